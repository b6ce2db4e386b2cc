"""What the figures draw: lines are the run's positions, shading is its spans, bars and dots are its
numbers.
"""

import numpy as np
import pytest
import torch
import xarray as xr
from drawn import artists, starting, texts
from families import tiny
from matplotlib.colors import to_hex
from numpy.testing import assert_allclose
from run_fixture import SPANS, large_run

import repo_interp as ri
from repo_interp.errors import InputError
from repo_interp.plots import (
    head_grid,
    heads_ranked,
    mass_by_span,
    pattern_sensitivity,
    pattern_shares,
    position_grid,
    position_lines,
    position_ranges,
    write_figures,
)
from repo_interp.plots.catalogue import figures_of, tables
from repo_interp.plots.pages.report import write_report
from repo_interp.plots.style import SCHEME_COLOURS, paper_figure, style
from repo_interp.plots.views.attention_mass import VIEW
from repo_interp.plots.views.ranges import heads_to_show


@pytest.fixture(scope="module")
def long_run() -> xr.DataTree:
    return large_run(prompts=2, layers=3, heads=2, tokens=4096)


def changed(run: xr.DataTree, **groups) -> xr.DataTree:
    """The run with some groups passed through a function, or left out where it is None."""
    kept = {name: node.to_dataset() for name, node in run.children.items()}
    for name, change in groups.items():
        if change is None:
            del kept[name]
        else:
            kept[name] = change(kept[name].copy(deep=True))
    return xr.DataTree.from_dict(
        {"/": xr.Dataset(attrs=run.attrs), **{f"/{name}": group for name, group in kept.items()}}
    )


def without_positions(layers):
    """Change a group so that `layers` are NoPE."""

    def change(group: xr.Dataset) -> xr.Dataset:
        there = ~group["layer"].isin(layers)
        named = group["scheme"].values.copy()
        named[~there.values] = "nope"
        for name in ("position", "position_range", "pattern_share"):
            if name in group:
                group[name] = group[name].where(there)
        return group.assign_coords(scheme=("layer", named))

    return change


def test_position_lines_draw_every_position(small):
    figure = position_lines(small, layer=5, head=1, prompt=1)
    (line,) = starting(figure, "positions")
    assert_allclose(line.get_xdata(), np.arange(96))
    assert_allclose(
        line.get_ydata(), small["positions"]["position"].sel(prompt=1, layer=5, head=1).values[:96]
    )
    assert line.get_color() == SCHEME_COLOURS["repo"]
    assert figure.axes[0].get_title(loc="left") == "Layer 5, head 1 (RePo), prompt 1, 96 tokens"
    awkward = texts(position_lines(small, layer=5, head=1))
    assert {"␣", "⇥", "\\u65e5\\u672c", "$x^2$", "</script>", "\\x00"} <= set(awkward)


def test_position_lines_shade_exactly_the_spans(small):
    figure = position_lines(small, layer=5, head=1, prompt=1)
    mask = small["positions"]["span_mask"].sel(prompt=1).values[:, :96] > 0
    for name in ("needle", "query", "generated"):
        shaded = np.zeros(96, bool)
        for patch in starting(figure, f"span {name}"):
            left, right = patch.get_x(), patch.get_x() + patch.get_width()
            shaded |= (np.arange(96) > left) & (np.arange(96) < right)
        assert (shaded == mask[SPANS.index(name)]).all()
    assert starting(figure, "span rest") == []
    assert {patch.get_gid() for patch in starting(figure, "part ")} == {
        "part needle.1.key",
        "part needle.1.value",
        "part needle.2",
    }


def test_long_prompts_have_few_labels_and_keep_their_extremes(long_run):
    figure = position_lines(long_run, layer=2, head=1)
    values = long_run["positions"]["position"].sel(prompt=0, layer=2, head=1).values[:4096]
    (line,) = starting(figure, "positions")
    kept, labels = line.get_xdata(), figure.axes[0].get_xticks(minor=True)
    assert len(kept) < 4096 and len(labels) <= 100
    assert_allclose(line.get_ydata(), values[kept])
    assert {values.argmin(), values.argmax(), 0, 4095} <= set(kept.tolist())
    needle = long_run["positions"]["span_mask"].sel(prompt=0, span="needle").values > 0
    assert needle.argmax() in labels


def test_without_texts_ids_are_labels_and_without_ids_nothing_is(small):
    bare = changed(small, positions=lambda group: group.drop_vars("token_text"))
    assert position_lines(bare, 5, 1).axes[0].get_xlabel() == "token index"
    ids = xr.full_like(small["positions"]["token_text"], 94, int)
    numbered = changed(bare, positions=lambda group: group.assign(token_id=ids))
    assert "⟨94⟩" in texts(position_lines(numbered, 5, 1))


def test_what_is_not_in_the_run_is_refused_by_name(small):
    for missing in ({"layer": 6}, {"head": 4}, {"prompt": 9}):
        ((axis, label),) = missing.items()
        with pytest.raises(InputError, match=f"no {axis} {label}"):
            position_lines(small, **{"layer": 0, "head": 0, **missing})
    with pytest.raises(InputError, match="'attention_mass'; the run has: positions, patterns"):
        heads_ranked(changed(small, attention_mass=None))


def test_layers_without_positions_are_drawn_as_such(small):
    """A model without any has no figures of positions, nor of chunks."""
    nope = changed(small, positions=without_positions([2]))
    for layer in (2, 3):
        said = texts(position_lines(nope, layer=layer, head=0))
        assert ("no positions in this layer" in said) == (layer == 2)
    grid = position_grid(nope)
    assert texts(grid).count("no positions") == 4
    assert len(starting(grid, "positions 2")[0].get_segments()) == 0
    change = without_positions(range(6))
    nope = changed(small, positions=change, patterns=change, attention_mass=None)
    nope["patterns/sensitivity"] = nope["patterns/sensitivity"] * np.nan
    assert list(figures_of(nope)) == []
    for draw, lacking in (
        (position_grid, r"no layer of this run gives tokens positions \(nope\)"),
        (position_ranges, "no layer of this run gives"),
        (lambda run: position_lines(run, 0, 0), "no layer of this run gives"),
        (pattern_shares, "no chunk of positions"),
        (pattern_sensitivity, "no chunk of learned positions"),
    ):
        with pytest.raises(InputError, match=lacking):
            draw(nope)


def test_grid_draws_every_head_in_its_cell(small):
    figure = position_grid(small, prompt=2)
    values = small["positions"]["position"].sel(prompt=2).values[..., :96]
    for layer, lines in enumerate(starting(figure, "positions ")):
        for head, segment in enumerate(lines.get_segments()):
            assert ((segment[:, 0] > head - 0.5) & (segment[:, 0] < head + 0.5)).all()
            assert ((segment[:, 1] > layer - 0.5) & (segment[:, 1] < layer + 0.5)).all()
            # Up is up on an axis that points down, and the cell's own scale is linear.
            assert np.corrcoef(-segment[:, 1], values[layer, head])[0, 1] > 1 - 1e-6
    first, last = (
        to_hex(starting(figure, f"positions {layer}")[0].get_color()[0]).upper() for layer in (0, 5)
    )
    assert (first, last) == (SCHEME_COLOURS["rope"], SCHEME_COLOURS["repo"])
    assert "95.0" in texts(figure)


def test_ranges_are_dots_at_the_mean_over_prompts_and_the_context_is_marked(small):
    figure = position_ranges(small)
    means = small["positions"]["position_range"].mean("prompt").values
    for layer, dots in enumerate(starting(figure, "heads ")):
        assert_allclose(dots.get_ydata(), means[layer])
        assert (abs(dots.get_xdata() - layer) < 0.5).all()
    assert {tuple(line.get_ydata()) for line in starting(figure, "level")} == {(96.0, 96.0)}
    assert figure.axes[0].get_yscale() == "log"
    assert "context length: 96 tokens" in texts(figure)
    medians = starting(figure, "control 5")[0].get_segments()
    assert_allclose([part[0, 1] for part in medians], [np.median(means[5])] * 4)


def test_sensitivity_is_in_per_cent_and_frames_the_choice(small):
    figure = pattern_sensitivity(small)
    shares = small["patterns"]["sensitivity"].transpose("pattern", "chunk_size", "epsilon")
    assert_allclose(figure.axes[1].images[0].get_array(), 100 * shares[1])
    assert {frame.get_xy() for frame in starting(figure, "choice")} == {(1.5, 0.5)}


def test_mass_by_span_draws_table_4_and_every_prompt(small):
    figure = mass_by_span(small)
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names == ["needle", "needle.1", "needle.2", "query", "rest", "generated"]
    mass = small["attention_mass"].sel(span=names)
    per_token = 100 * mass["mass_per_token"]
    mean, (repo,) = starting(figure, "mean ")[0], starting(figure, "mean repo")
    assert_allclose(mean.get_xdata(), mass["table"])
    learned = per_token.sel(layer=[2, 3, 4, 5])
    assert_allclose(repo.get_xdata(), learned.mean(["prompt", "layer", "head"]))
    expected = per_token.mean(["layer", "head"]).transpose("span", "prompt")
    assert_allclose([line.get_xdata() for line in artists(figure, "prompts ")], expected)
    (interval,) = starting(figure, "middle repo")
    heads = learned.sel(span="query").mean("prompt")
    assert_allclose(interval.get_segments()[3][:, 0], np.percentile(heads.values, [5, 95]))
    assert_allclose(starting(figure, "control")[0].get_xdata(), [100 / 96] * 6)


def test_heads_are_ranked_by_mass_and_coloured_by_scheme(small):
    figure = heads_ranked(small)
    mass = 100 * small["attention_mass"]["mass"].sel(span="needle").mean("prompt")
    widths = np.nanmax([line.get_xdata() for line in starting(figure, "mean")], axis=0)
    assert_allclose(widths, np.sort(mass.values.ravel())[::-1][:16])
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels[0] == "L2 H2" and float(mass.sel(layer=2, head=2)) == pytest.approx(widths[0])
    expected = (small["positions"]["span_mask"].sel(span="needle") > 0).sum("token").mean() / 96
    assert_allclose(starting(figure, "control")[0].get_xdata(), 100 * float(expected))
    assert_allclose(dict(VIEW.figures(small))["heads_map"].axes[0].images[0].get_array(), mass)


def test_head_grid_draws_values_with_name_and_units_diverges_from_zero_and_leaves_out_nan():
    values = xr.DataArray(
        [[-1.0, np.nan], [3.0, 0.5]],
        {"layer": [3, 7], "head": [0, 5]},
        ("layer", "head"),
        attrs={"long_name": "range", "units": "positions"},
    )
    with style():
        ax = head_grid(values, paper_figure(3.3, 3).subplots())
    image = ax.images[0]
    assert_allclose(image.get_array().filled(np.nan), values)
    assert ax.get_title(loc="left") == "range (positions)"
    assert [label.get_text() for label in ax.get_yticklabels()] == ["3", "7"]
    assert (image.norm.vmin, image.norm.vmax) == (-3.0, 3.0)


def test_the_heads_to_show_are_learned_ones_that_show_most(small):
    first = heads_to_show(small)
    assert all(layer >= 2 for layer, _ in first) and len(set(first)) == len(first)
    ranges = small["positions"]["position_range"].mean("prompt")
    layer, head = heads_to_show(changed(small, attention_mass=None))[0]
    assert ranges.sel(layer=layer, head=head) == ranges.sel(layer=[2, 3, 4, 5]).max()


def test_heads_that_share_their_positions_are_shown_once_and_a_likeness_comes_after_what_differs(
    small,
):
    def shared(group):
        group = group.sel(layer=[3, 4, 5], head=[0, 1])
        position = group["position"].copy()
        position.loc[{"layer": 3}] = position.sel(layer=3, head=0)
        position.loc[{"layer": 4}] = 2 * position.sel(layer=3)
        wave = np.sin(np.arange(position.sizes["token"]) * np.array([[0.7], [1.9]]))
        position.loc[{"layer": 5}] = np.where(np.isfinite(position.sel(layer=5)), wave, np.nan)
        return group.assign(position=position)

    shown = heads_to_show(changed(small, positions=shared, attention_mass=None))
    assert sorted(layer for layer, _ in shown) == [3, 4, 5, 5]
    assert shown[-1][0] in (3, 4)


def test_write_figures_draws_what_the_groups_allow(small, tmp_path):
    masses = changed(small, positions=None, patterns=None)
    files = write_figures(masses, tmp_path / "figures")
    names = {"attention_mass_by_span", "heads_ranked", "heads_map"}
    assert {file.name for file in files} == {f"{name}.png" for name in names}
    assert sorted(files) == sorted((tmp_path / "figures").iterdir())
    assert write_figures(changed(masses, attention_mass=None), tmp_path / "none") == []


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("layout", ["cope", "nope"])
def test_a_model_without_positions_has_no_figures_of_them(layout, tmp_path):
    """Found: axes with nothing in them, a table of dashes, and a page that said every token had its
    index.
    """
    torch.manual_seed(0)
    bridge = ri.bridge(ri.reposition(tiny("llama"), layout))
    of_model = ri.analyze(bridge, [list(range(3, 43))], ("positions", "patterns", "attention_rows"))
    assert list(figures_of(of_model)) == []
    assert not {"positions", "patterns"} & {table.name for table in tables(of_model)}
    assert write_report(of_model, tmp_path / "report.html", tmp_path / "figures") == []
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "No layer gives tokens positions" in page and "at its index in the prompt" not in page


def test_runs_of_some_layers_and_heads_keep_their_numbers(small):
    part = changed(
        small,
        **{name: lambda group: group.sel(layer=[2, 5], head=[1, 3]) for name in small.children},
    )
    assert {"2", "5", "1", "3"} <= set(texts(position_grid(part)))
    assert "L5 H3" in texts(heads_ranked(part))
    assert set(heads_to_show(part)) <= {(2, 1), (2, 3), (5, 1), (5, 3)}
