"""Colours that stay apart, labels that can be read, files that are the same every time."""

import itertools
import os
import subprocess
import sys

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image
from places import SUPPORT, tree
from refusals import refused

from repo_interp import plots
from repo_interp.errors import InputError
from repo_interp.plots.marks.titles import name_figure
from repo_interp.plots.style import (
    PATTERN_COLOURS,
    SCHEME_COLOURS,
    SPAN_COLOURS,
    paper_figure,
    rendered,
    save_figure,
    span_colours,
    style,
)

# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
VISIONS = {
    "normal": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
}


def lab(colour: str, vision: str) -> np.ndarray:
    """CIE L*a*b* of a colour as seen with `vision`."""
    rgb = np.array(to_rgb(colour))
    light = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    linear = np.clip(np.array(VISIONS[vision]) @ light, 0, 1)
    to_xyz = [
        [0.4124564, 0.3575761, 0.1804375],
        [0.2126729, 0.7151522, 0.0721750],
        [0.0193339, 0.1191920, 0.9503041],
    ]
    scaled = np.array(to_xyz) @ linear / [0.95047, 1.0, 1.08883]
    x, y, z = np.where(scaled > 0.008856, np.cbrt(scaled), 7.787 * scaled + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("colours", [SCHEME_COLOURS, PATTERN_COLOURS], ids=["schemes", "patterns"])
def test_colours_stay_apart_for_every_vision(colours, vision):
    seen = {name: lab(colour, vision) for name, colour in colours.items()}
    for one, other in itertools.combinations(seen, 2):
        assert np.linalg.norm(seen[one] - seen[other]) > 15, (one, other)


def test_span_colours_are_fixed_for_usual_names_and_shaded_for_parts():
    parts = ["needle", "needle.1.key", "needle.1.value"]
    colours = span_colours([*parts, "paragraph", "query", "table"])
    assert colours["needle"] == SPAN_COLOURS["needle"]
    assert len(set(colours.values())) == 6
    whole, key, value = (sum(to_rgb(colours[part])) for part in parts)
    assert value < key < whole


def test_unknown_format_is_refused(tmp_path):
    with style():
        figure = paper_figure()
    with pytest.raises(ValueError, match="png, svg, pdf"):
        save_figure(figure, tmp_path / "figure", ["png", "gif"])
    assert not list(tmp_path.iterdir())


NAMES_OF_FIGURES = {
    "a": ["a.png"],
    "a.png": ["a.png"],
    "A.PNG": ["A.PNG"],
    "a.svg": ["a.svg"],
    "head_0.5": ["head_0.5.png"],
}


@pytest.mark.parametrize("stem", NAMES_OF_FIGURES)
def test_the_suffix_of_a_format_is_written_once(stem, tmp_path):
    with style():
        figure = paper_figure(1, 1)
        figure.subplots()
    files = save_figure(figure, tmp_path / stem)
    assert [file.name for file in files] == NAMES_OF_FIGURES[stem]
    assert [file.name for file in tmp_path.iterdir()] == NAMES_OF_FIGURES[stem]


def test_several_formats_stand_beside_the_suffix_and_another_one_is_refused(tmp_path):
    with style():
        figure = paper_figure(1, 1)
        figure.subplots()
    files = save_figure(figure, tmp_path / "b.v1.pdf", ("png", "pdf"))
    assert [file.name for file in files] == ["b.v1.png", "b.v1.pdf"]
    assert files[1].read_bytes().startswith(b"%PDF")
    for stem, formats, line in (
        ("c.pdf", "png", r"c\.pdf ends in \.pdf, and png was asked for"),
        ("c.gif", None, "a figure is written as png, svg, pdf; got gif"),
        (5, None, "a path was wanted, a file for the figure; got 5"),
    ):
        with refused(line):
            save_figure(figure, stem if stem == 5 else tmp_path / stem, formats)
    with refused("a figure was wanted; got 'a.png'"):
        save_figure("a.png", figure)
    assert len([*tmp_path.iterdir()]) == 2


@pytest.mark.parametrize("draw", [plots.mass_by_span, plots.pattern_shares])
def test_every_figure_takes_a_size(draw, small):
    assert draw(small, figsize=(4, 3)).get_size_inches().tolist() == [4, 3]


@pytest.mark.parametrize("draw", [plots.position_grid, plots.mass_by_span])
def test_a_figure_of_one_axes_is_drawn_on_the_callers(draw, small):
    own = draw(small)
    ax = Figure(layout="constrained").subplots(1, 2)[1]
    assert draw(small, ax=ax) is ax
    ids = [
        {artist.get_gid() for artist in axes.findobj() if artist.get_gid()}
        for axes in (own.axes[0], ax)
    ]
    assert ids[0] and ids[0] <= ids[1] and ax.get_ylabel() == own.axes[0].get_ylabel()
    ax.figure.draw_without_rendering()


@pytest.mark.parametrize(
    ("where", "line"),
    [
        ({"ax": 3}, "one matplotlib Axes was wanted, .* got 3"),
        ({"figsize": (4, 0)}, "figsize is .4, 0."),
        ({"ax": Figure().subplots(), "figsize": (4, 3)}, "got also figsize"),
    ],
)
def test_what_is_no_place_for_a_figure_is_refused(where, line, small):
    with pytest.raises(InputError, match=line):
        plots.mass_by_span(small, **where)


def test_a_figure_of_several_axes_leaves_the_callers_alone(small):
    ax = Figure().subplots()
    with pytest.raises(InputError, match="this figure may have several axes"):
        plots.pattern_shares(small, ax=ax)
    assert not ax.lines and not ax.texts


def test_what_the_user_has_set_stays_and_the_rest_is_ours(small):
    with mpl.rc_context({"font.family": ["STIXGeneral"], "font.size": 14.0}):
        ax = plots.mass_by_span(small).axes[0]
    assert ax.yaxis.label.get_fontfamily()[0] == "STIXGeneral" and ax.yaxis.label.get_size() == 14
    assert ax.title.get_size() == 15 and not ax.spines["top"].get_visible()
    with mpl.rc_context({"lines.linewidth": 3.0}), style(), style():
        assert mpl.rcParams["lines.linewidth"] == 3 and mpl.rcParams["axes.titlesize"] == 7.5
    with mpl.rc_context({"font.size": 14.0}), style(), style():
        assert mpl.rcParams["axes.titlesize"] == 15


SCRIPT = """
import sys
from pathlib import Path
import xarray as xr
from run_fixture import small_run
from repo_interp.plots.pages.report import write_report
part = small_run()["attention_mass"].to_dataset().isel(layer=[5])
run, out = xr.DataTree.from_dict({"/attention_mass": part}), Path(sys.argv[1])
assert write_report(run, out / "report.html", out, ("png", "svg", "pdf")) == []
"""


def test_another_process_writes_the_same_bytes(tmp_path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    monkeypatch.setattr(sys, "argv", ["", str(here)])
    exec(SCRIPT, {})
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SUPPORT), *sys.path]))
    subprocess.run([sys.executable, "-c", SCRIPT, str(there)], check=True)
    files = tree(here)
    assert {"heads_map.pdf", "heads_map.png", "heads_map.svg", "report.html"} <= {*files}
    assert files == tree(there)


def test_files_have_their_fonts_and_no_dates_and_the_style_leaves_no_trace(tmp_path):
    before = dict(mpl.rcParams)
    with style():
        assert mpl.rcParams["pdf.fonttype"] == 42
        figure = paper_figure(2, 1)
        figure.subplots().set_xlabel("attention mass (10⁻²)")
    assert dict(mpl.rcParams) == before
    files = save_figure(figure, tmp_path / "figure", ("pdf", "svg", "png"))
    pdf, svg, png = (path.read_bytes() for path in files)
    assert b"/FontFile2" in pdf and b"/CreationDate" not in pdf and b"Software" not in png
    assert "attention mass (10⁻²)" in svg.decode() and b"<dc:date>" not in svg
    figure.savefig(tmp_path / "own.svg")
    assert (tmp_path / "own.svg").read_bytes() == svg
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_a_png_keeps_every_color_of_a_color_bar(tmp_path):
    """A palette of 256 entries gave bars of 94 colors, gray over a third of their length."""
    with style():
        figure = paper_figure(3, 2)
        ax = figure.subplots()
        drawn = ax.imshow(np.linspace(-1, 1, 48 * 32).reshape(32, 48), cmap="PuOr")
        figure.colorbar(drawn)
    (file,) = save_figure(figure, tmp_path / "figure")
    with Image.open(file) as picture:
        found = {color[:3] for _, color in picture.convert("RGBA").getcolors(1 << 24) or []}
    levels = drawn.cmap(np.arange(256))
    assert {tuple(one[:3]) for one in np.round(levels * 255).astype(int).tolist()} <= found


def test_names_are_drawn_as_they_are_and_what_no_font_has_as_its_code():
    """No dollar sign begins mathematics, and nothing is missing from a font: both would be
    warnings, which are errors.
    """
    with style():
        figure = paper_figure(4, 2)
        ax = figure.subplots()
        ax.plot([0, 1], [0, 1], label="a_$x^2$ and 模型")
        ax.set(title="$HOME costs 5 $", xlabel="سلام", ylabel="\x07 and 🙂", xticks=[])
        ax.set_xticks([0, 0.5, 1], ["$a$", "模型", "plain"])
        ax.set_yticks([0.25], ["字"], minor=True)
        ax.legend()
        figure.suptitle("𝑥 of 模\nand more")
    svg = rendered(figure, ("svg", "png"))["svg"].decode()
    drawn = ["a_$x^2$ and \\u6a21\\u578b", "$HOME costs 5 $", "سلام", "\\x07 and \\U0001f642"]
    drawn += ["$a$", "\\u6a21\\u578b", "plain", "\\u5b57", "𝑥 of \\u6a21"]
    assert [text for text in drawn if f">{text}<" not in svg] == []


@pytest.mark.parametrize("width", [3.3, 6.8])
@style()
def test_a_long_title_ends_within_the_figure(width):
    figure = paper_figure(width)
    title = "divergence of attention outputs from those at the training length, mean over heads"
    name_figure(figure, title, "one run")
    figure.draw_without_rendering()
    assert figure._suptitle.get_window_extent().x1 < figure.bbox.x1
    assert " ".join(figure._suptitle.get_text().split()) == f"{title.capitalize()} one run"
