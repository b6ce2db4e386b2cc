"""Colours that stay apart, labels that can be read, files that are the same every time."""

import io
import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from PIL import Image
from places import SUPPORT

from repo_interp.plots.marks.drawing import contiguous, thin, token_label
from repo_interp.plots.style import (
    FORMATS,
    PATTERN_COLOURS,
    SCHEME_COLOURS,
    SPAN_COLOURS,
    paper_figure,
    rendered,
    save_figure,
    span_colours,
    style,
    with_palette,
)

SCHEMES = ["rope", "nope", "repo", "hope", "alibi", "kerple", "fire", "learned", "cope", "continuous", "multihead_continuous"]
# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
VISIONS = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
}


def lab(colour: str, vision: str) -> np.ndarray:
    """CIE L*a*b* of a colour as seen with `vision`."""
    rgb = np.array(to_rgb(colour))
    linear = np.clip(np.array(VISIONS[vision]) @ np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4), 0, 1)
    to_xyz = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
    scaled = np.array(to_xyz) @ linear / [0.95047, 1.0, 1.08883]
    x, y, z = np.where(scaled > 0.008856, np.cbrt(scaled), 7.787 * scaled + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("colours", [SCHEME_COLOURS, PATTERN_COLOURS], ids=["schemes", "patterns"])
def test_colours_stay_apart_for_every_vision(colours, vision):
    distances = {
        pair: np.linalg.norm(lab(colours[pair[0]], vision) - lab(colours[pair[1]], vision))
        for pair in itertools.combinations(colours, 2)
    }
    closest = min(distances, key=distances.get)
    assert distances[closest] > 15, f"{closest} differ by {distances[closest]:.1f} with {vision}"


def test_every_scheme_has_a_colour_of_its_own():
    assert list(SCHEME_COLOURS) and set(SCHEMES) == set(SCHEME_COLOURS)
    assert len(set(SCHEME_COLOURS.values())) == len(SCHEMES)


def test_span_colours_are_fixed_for_usual_names_and_shaded_for_parts():
    colours = span_colours(["needle", "needle.1.key", "needle.1.value", "paragraph", "query", "table"])
    assert colours["needle"] == SPAN_COLOURS["needle"]
    assert len(set(colours.values())) == 6
    assert sum(to_rgb(colours["needle.1.value"])) < sum(to_rgb(colours["needle.1.key"])) < sum(to_rgb(colours["needle"]))


@pytest.mark.parametrize(
    ("text", "label"),
    [
        (" the", "␣the"),
        ("\n", "↵"),
        ("\t\r", "⇥␍"),
        ("", "∅"),
        ("\x00", "\\x00"),
        ("a\u200bb", "a\\u200bb"),
        ("\u00a0", "\\xa0"),
        ("naïve", "naïve"),
        ("日本", "\\u65e5\\u672c"),
        ("🙂", "\\U0001f642"),
        ("\u0301", "◌\u0301"),
        ("$x^2$", "$x^2$"),
        ("abcdefghijklmnop", "abcdefghijklm…"),
    ],
)
def test_token_labels_show_every_character(text, label):
    with style():
        assert token_label(text) == label


def test_thin_keeps_the_first_and_never_crowds():
    kept = thin([50, 51, 0, 10, 55, 49, 99], gap=5)
    assert kept == [0, 10, 50, 55, 99]


def test_contiguous_stretches():
    assert contiguous([9, 3, 4, 5]) == [(3, 5), (9, 9)]
    assert contiguous([]) == []


def test_style_leaves_no_trace():
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    with style():
        assert mpl.rcParams["pdf.fonttype"] == 42
    assert dict(mpl.rcParams) == before


def test_unknown_format_is_refused(tmp_path):
    with style():
        figure = paper_figure()
    with pytest.raises(ValueError, match="png, svg, pdf"):
        save_figure(figure, tmp_path / "figure", ["png", "gif"])
    assert not list(tmp_path.iterdir())


SCRIPT = """
import sys
from run_fixture import small_run
from repo_interp.plots import mass_by_span, position_lines, report_page, save_figure
run = small_run()
save_figure(position_lines(run, layer=5, head=1), sys.argv[1] + "/lines", ("png", "svg", "pdf"))
save_figure(mass_by_span(run), sys.argv[1] + "/mass")
report_page(run, sys.argv[1] + "/report.html")
"""


def test_two_processes_write_the_same_bytes(tmp_path):
    written = []
    for seed in ("1", "2"):
        directory = tmp_path / seed
        directory.mkdir()
        subprocess.run(
            [sys.executable, "-c", SCRIPT, str(directory)],
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(SUPPORT)},
        )
        written.append({path.name: path.read_bytes() for path in sorted(directory.iterdir())})
    assert len(written[0]) == 5
    assert [name for name in written[0] if written[0][name] != written[1][name]] == []


def test_fonts_travel_with_the_file(tmp_path):
    with style():
        figure = paper_figure()
        figure.subplots().set_xlabel("attention mass (10⁻²)")
    for path in save_figure(figure, tmp_path / "figure", FORMATS):
        content = path.read_bytes()
        if path.suffix == ".pdf":
            assert b"/FontFile2" in content and b"/CreationDate" not in content
        elif path.suffix == ".svg":
            assert "attention mass (10⁻²)" in content.decode() and b"<dc:date>" not in content
        else:
            assert b"Software" not in content


def test_a_figure_saves_itself_in_the_style_and_shows_itself_in_a_notebook(tmp_path):
    with style():
        figure, same = paper_figure(2, 1), paper_figure(2, 1)
        figure.subplots().set_xlabel("token")
        same.subplots().set_xlabel("token")
    figure.savefig(tmp_path / "figure.svg")
    save_figure(same, tmp_path / "same", ["svg"])
    assert (tmp_path / "figure.svg").read_bytes() == (tmp_path / "same.svg").read_bytes()
    assert figure._repr_png_().startswith(b"\x89PNG")


def drawn_and_with_palette(colours, size):
    """A PNG with pixels of `colours` [pixel, RGBA] in a picture of `size`, and the pixels that are left of it; both as arrays."""
    pixels, png = np.resize(colours.astype(np.uint8), (*size, 4)), io.BytesIO()
    Image.fromarray(pixels).save(png, "png", dpi=(300, 300))
    with Image.open(io.BytesIO(with_palette(png.getvalue()))) as smaller:
        assert round(smaller.info["dpi"][0]) == 300
        return pixels, np.asarray(smaller.convert("RGBA")), smaller.mode


def test_a_picture_of_few_colours_keeps_them_and_one_with_transparent_parts_is_left_alone():
    colours = np.column_stack([np.arange(256), np.arange(256)[::-1], np.arange(256) // 2, np.full(256, 255)])
    for opaque, mode in ((colours, "P"), (colours[:2], "P"), (colours * [1, 1, 1, 0.5], "RGBA")):
        pixels, left, found = drawn_and_with_palette(opaque, (32, 40))
        assert np.array_equal(left, pixels) and found == mode


def test_a_picture_of_many_colours_keeps_areas_exactly_and_no_colour_is_far_off():
    gradient = np.linspace([0, 80, 255], [255, 200, 0], 3000)
    rare = np.array([[255, 0, 255], [0, 0, 0]])
    colours = np.concatenate([np.repeat([[250, 251, 252]], 30_000, 0), np.repeat([[250, 251, 250]], 3_000, 0), gradient, rare])
    pixels, left, mode = drawn_and_with_palette(np.column_stack([colours, np.full(len(colours), 255)]), (len(colours), 1))
    off = np.abs(left.astype(int) - pixels).max(-1)[:, 0]
    assert mode == "P" and len(np.unique(left.reshape(-1, 4), axis=0)) <= 256
    assert off[:33_000].max() == 0 and off.max() <= 3


def test_names_are_drawn_as_they_are_and_what_no_font_has_as_its_code():
    """No dollar sign begins mathematics, and nothing is missing from a font: both would be warnings, which are errors."""
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
    for text in (
        "a_$x^2$ and \\u6a21\\u578b",
        "$HOME costs 5 $",
        "سلام",
        "\\x07 and \\U0001f642",
        "$a$",
        "plain",
        "\\u5b57",
        "𝑥 of \\u6a21",
    ):
        assert f">{text}<" in svg, text
    assert [label.get_text() for label in ax.get_xticklabels()] == ["$a$", "\\u6a21\\u578b", "plain"]
    assert list(ax.get_xlim()) == pytest.approx([-0.05, 1.05])
