"""What the figures draw: lines are the run's positions, shading is its spans, bars and dots are its
numbers.
"""

import numpy as np
import pytest
import torch
import xarray as xr
from drawn import artist, artists, starting, texts
from families import tiny
from matplotlib.colors import to_hex
from numpy.testing import assert_allclose
from refusals import refused
from run_fixture import SPANS, large_run

import repo_interp as ri
from repo_interp.errors import InputError
from repo_interp.plots import (
    heads_ranked,
    mass_by_span,
    pattern_sensitivity,
    pattern_shares,
    position_grid,
    position_lines,
    position_ranges,
    write_figures,
)
from repo_interp.plots.pages.report import write_report
from repo_interp.plots.style import SCHEME_COLOURS
from repo_interp.plots.view_catalogue import figures_of, tables
from repo_interp.plots.views.attention_mass import ranking_chart
from repo_interp.plots.views.patterns import sensitivity_grid
from repo_interp.plots.views.ranges import heads_to_show, range_chart


def changed(run: xr.DataTree, **changes) -> xr.DataTree:
    """The run with some groups passed through a function."""
    return run.assign(
        {name: xr.DataTree(change(run[name].to_dataset())) for name, change in changes.items()}
    )


def test_position_lines_draw_every_position(small):
    figure = position_lines(small, layer=5, head=1, prompt=1)
    (line,) = starting(figure, "positions")
    position = small["positions"]["position"].sel(prompt=1, layer=5, head=1)
    assert_allclose(line.get_xydata(), list(enumerate(position.values[:96])))
    assert line.get_color() == SCHEME_COLOURS["repo"]
    assert figure.axes[0].get_title(loc="left") == "Layer 5, head 1 (RePo), prompt 1, 96 tokens"
    awkward = texts(position_lines(small, layer=5, head=1))
    assert {"␣", "⇥", "\\u65e5\\u672c", "$x^2$", "</script>", "\\x00"} <= set(awkward)


def test_a_caption_is_no_name_of_a_file_and_a_legend_has_two_entries_at_least(measured):
    """Found: "Attention by octave" below a figure, and legends of a single square."""
    drawn = list(figures_of(measured))
    assert len(drawn) > 50
    for one in drawn:
        words = one.name.replace("_", " ")
        assert one.caption.strip(".").lower() != words and " " in one.caption, one.name
        legends = [*one.figure.legends, *filter(None, (ax.get_legend() for ax in one.figure.axes))]
        assert all(len(legend.get_texts()) > 1 for legend in legends), one.name


def test_position_lines_of_several_heads_have_a_panel_each(small):
    figure = position_lines(small, layer=5, head=[0, 2], prompt=1)
    for ax, head in zip(figure.axes, (0, 2), strict=True):
        (line,) = starting(ax, "positions")
        position = small["positions"]["position"].sel(prompt=1, layer=5, head=head)
        assert_allclose(line.get_ydata(), position.values[:96])
        assert ax.get_title(loc="left") == f"Layer 5, head {head} (RePo), prompt 1, 96 tokens"
    for heads, said in (([], "no head is named"), ([0, 9], "no head 9"), ("x", "no head 'x'")):
        with refused(said):
            position_lines(small, 5, heads)
    alike = small.copy(deep=True)
    alike["positions"]["position"].loc[{"head": 2}] = small["positions"]["position"].sel(head=0)
    (ax,) = position_lines(alike, layer=5, head=[0, 2], prompt=1).axes
    assert "heads 0, 2 alike" in ax.get_title(loc="left"), "found: one line, drawn twice"


def test_position_lines_shade_exactly_the_spans(small):
    figure = position_lines(small, layer=5, head=1, prompt=1)
    for name in SPANS:
        shaded = np.zeros(96, bool)
        for patch in (*starting(figure, f"span {name}"), *starting(figure, f"part {name}")):
            left, right = patch.get_x(), patch.get_x() + patch.get_width()
            shaded |= (np.arange(96) > left) & (np.arange(96) < right)
        mask = small["positions"]["span_mask"].sel(prompt=1, span=name).values[:96] > 0
        assert (shaded == (mask & (name != "rest"))).all(), name


def test_long_prompts_have_few_labels_and_keep_their_extremes():
    run = large_run(prompts=1, layers=3, heads=2, tokens=4096)
    figure = position_lines(run, layer=2, head=1)
    values = run["positions"]["position"].sel(prompt=0, layer=2, head=1).values[:4096]
    (line,) = starting(figure, "positions")
    kept, labels = line.get_xdata(), figure.axes[0].get_xticks(minor=True)
    assert len(kept) < 4096 and len(labels) <= 100
    assert_allclose(line.get_ydata(), values[kept])
    assert {values.argmin(), values.argmax(), 0, 4095} <= set(kept.tolist())
    needle = run["positions"]["span_mask"].sel(prompt=0, span="needle").values > 0
    assert needle.argmax() in labels


def test_without_texts_ids_are_labels_and_without_ids_nothing_is(small):
    bare = changed(small, positions=lambda group: group.drop_vars("token_text"))
    assert position_lines(bare, 5, 1).axes[0].get_xlabel() == "token index"
    ids = xr.full_like(small["positions"]["token_text"], 94, int)
    numbered = changed(bare, positions=lambda group: group.assign(token_id=ids))
    assert "⟨94⟩" in texts(position_lines(numbered, 5, 1))


def test_what_is_not_in_the_run_is_refused_by_name(small):
    for axis, label in {"layer": 6, "head": 4, "prompt": 9}.items():
        with pytest.raises(InputError, match=f"no {axis} {label}"):
            position_lines(small, **{"layer": 0, "head": 0, axis: label})
    with pytest.raises(InputError, match="'attention_mass'; the run has: positions, patterns"):
        heads_ranked(small.drop_nodes("attention_mass"))


def test_layers_without_positions_are_drawn_as_such(small):
    nope = small.copy(deep=True)
    nope["positions"]["position"][:, 2] = np.nan
    for layer in (2, 3):
        said = texts(position_lines(nope, layer=layer, head=0))
        assert ("no positions in this layer" in said) == (layer == 2)
    grid = position_grid(nope)
    assert texts(grid).count("no positions") == 4
    assert len(artist(grid, "positions 2").get_segments()) == 0


def test_grid_draws_every_head_in_its_cell(small):
    figure = position_grid(small, prompt=2)
    values = small["positions"]["position"].sel(prompt=2).values[..., :96]
    for layer, lines in enumerate(starting(figure, "positions ")):
        for head, segment in enumerate(lines.get_segments()):
            assert (abs(segment - [head, layer]) < 0.5).all()
            # Up is up on an axis that points down, and the cell's own scale is linear.
            assert np.corrcoef(-segment[:, 1], values[layer, head])[0, 1] > 1 - 1e-6
        colour = SCHEME_COLOURS["rope" if layer < 2 else "repo"]
        assert to_hex(lines.get_color()[0]).upper() == colour
    assert "95.0" in texts(figure)


def test_mass_by_span_draws_table_4_every_prompt_and_the_middle_of_heads(small):
    figure = mass_by_span(small)
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names == ["needle", "needle.1", "needle.2", "query", "rest", "generated"]
    mass = small["attention_mass"].sel(span=names)
    assert_allclose(artist(figure, "mean ").get_xdata(), mass["table"])
    per_token = 100 * mass["mass_per_token"]
    expected = per_token.mean(["layer", "head"]).transpose("span", "prompt")
    assert_allclose([line.get_xdata() for line in artists(figure, "prompts ")], expected)
    learned = per_token.sel(layer=[2, 3, 4, 5]).mean("prompt")
    assert_allclose(artist(figure, "mean repo").get_xdata(), learned.mean(["layer", "head"]))
    ends = artist(figure, "middle repo").get_segments()[3][:, 0]
    assert_allclose(ends, np.percentile(learned.sel(span="query"), [5, 95]))
    assert_allclose(artist(figure, "control").get_xdata(), [100 / 96] * 6)


def test_charts_are_of_the_numbers_of_the_run(small):
    """Their kinds are drawn in test_plots_charts.py."""
    ranges, ranked = range_chart(small), ranking_chart(small, "needle")
    assert [*ranges.levels.values()] == [96]
    ((values, _),) = ranges.panels.values()
    assert values.equals(small["positions"]["position_range"])
    assert ranked.values["rank"][0] == "L2 H2"
    grid = sensitivity_grid(small)
    shares = small["patterns"]["sensitivity"].transpose("pattern", "chunk_size", "epsilon")
    assert grid.chosen == (1, 2)
    assert_allclose(grid.panels["mono"], 100 * shares.sel(pattern="mono"))


def test_heads_of_the_largest_range_are_shown_and_those_that_share_their_positions_once(small):
    """A likeness comes after what differs."""

    def shared(group):
        group = group.sel(layer=[3, 4, 5], head=[0, 1])
        position = group["position"].copy()
        position.loc[{"layer": 3}] = position.sel(layer=3, head=0)
        position.loc[{"layer": 4}] = 2 * position.sel(layer=3)
        wave = np.sin(np.arange(position.sizes["token"]) * np.array([[0.7], [1.9]]))
        position.loc[{"layer": 5}] = np.where(np.isfinite(position.sel(layer=5)), wave, np.nan)
        return group.assign(position=position)

    run = small.drop_nodes("attention_mass")
    ranges = run["positions"]["position_range"].mean("prompt").sel(layer=[2, 3, 4, 5])
    layer, head = heads_to_show(run)[0]
    assert ranges.sel(layer=layer, head=head) == ranges.max()
    shown = heads_to_show(changed(run, positions=shared))
    assert sorted(layer for layer, _ in shown) == [3, 4, 5, 5]
    assert shown[-1][0] in (3, 4)


def test_write_figures_draws_what_the_groups_allow(small, tmp_path):
    files = write_figures(small.drop_nodes(["positions", "patterns"]), tmp_path / "figures")
    names = {"attention_mass_by_span.png", "heads_ranked.png", "heads_map.png"}
    assert {file.name for file in files} == names
    assert sorted(files) == sorted((tmp_path / "figures").iterdir())


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
    for draw, lacking in (
        (position_ranges, rf"no layer of this run gives tokens positions \({layout}\)"),
        (pattern_shares, "no chunk of positions"),
        (pattern_sensitivity, "no chunk of learned positions"),
    ):
        with pytest.raises(InputError, match=lacking):
            draw(of_model)


def test_runs_of_some_layers_and_heads_keep_their_numbers(small):
    part = small.sel(layer=[2, 5], head=[1, 3])
    assert {"2", "5", "1", "3"} <= set(texts(position_grid(part)))
    assert "L5 H3" in texts(heads_ranked(part))
    assert set(heads_to_show(part)) <= {(2, 1), (2, 3), (5, 1), (5, 3)}
