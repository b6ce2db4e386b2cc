r"""One look for every figure, with the same bytes every time.

Figures have the column and page widths of a paper, and one color per scheme, span and pattern.

The colors are from Okabe and Ito (2008), with four more that protanopes and deuteranopes can
distinguish from them. The lightest are darkened for text. Fonts are embedded: TrueType in PDF
(fonttype 42), text in SVG.

A character that no font has is written as its code: "模型" -> "\u6a21\u578b".

    ri.plots.position_lines(run, 5, 1, figsize=(4, 2))        every figure takes a size in inches
    ri.plots.position_lines(run, 5, 1, ax=ax)                 one of a single axes is drawn on yours, which is returned

The style keeps your rcParams, such as fonts: it only sets parameters that still have matplotlib's
default.

This module knows nothing about runs: it maps names to colors, and makes figures. It never uses
pyplot, so no figure stays open and there is no global state. A dollar sign is drawn as such: names
of checkpoints, spans and tokens are not mathematics.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any, NoReturn, TypeVar, cast

import matplotlib as mpl
import xarray as xr
from annotated_types import Interval
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text
from matplotlib.transforms import ScaledTranslation

from repo_interp.errors import InputError, one_line, quoted
from repo_interp.plots.glyphs import FONTS, make_legible
from repo_interp.storage.files import path_of
from repo_interp.values import checked

Drawn = TypeVar("Drawn")
Inches = Annotated[float, Interval(gt=0, le=1000)]

COLUMN_WIDTH = 3.3
"""Width of one column of a two-column paper, in inches."""
PAGE_WIDTH = 6.8
"""Width of both columns, in inches."""
PAGE_HEIGHT = 8.8
"""Height of the tallest figure that leaves space for a caption, in inches."""
LETTERS_PER_INCH = 18
"""Letters per inch of a title."""

_SCHEMES = {
    "rope": ("RoPE", "#0072B2"),
    "repo": ("RePo", "#D55E00"),
    "nope": ("NoPE", "#5A5A5A"),
    "hope": ("HoPE", "#009E73"),
    "alibi": ("ALiBi", "#56B4E9"),
    "kerple": ("KERPLE", "#CC79A7"),
    "fire": ("FIRE", "#E69F00"),
    "learned": ("learned", "#4B2BD6"),
    "cope": ("CoPE", "#44D07B"),
    "continuous": ("continuous", "#000000"),
    "multihead_continuous": ("multi-head continuous", "#804020"),
}
SCHEME_COLOURS: Mapping[str, str] = {scheme: colour for scheme, (_, colour) in _SCHEMES.items()}
SCHEME_NAMES: Mapping[str, str] = {
    **{scheme: name for scheme, (name, _) in _SCHEMES.items()},
    "repo_alibi": "RePo-ALiBi",
    "repo_kerple": "RePo-KERPLE",
    "repo_fire": "RePo-FIRE",
    "repo_index": "RePo with index",
    "repo_attention": "RePo with attention",
    "repo_convolution": "RePo with convolution",
    "cope_rope": "CoPE + RoPE",
    "cope_relative": "CoPE + relative",
    "cope_alibi": "CoPE-ALiBi",
    "cope_mlp": "CoPE-MLP",
    "hope_ab1": "HoPE AB1",
    "hope_ab2": "HoPE AB2",
    "hope_ab3": "HoPE AB3",
    "rope_high": "RoPE, removed",
}
PATTERN_COLOURS: Mapping[str, str] = {"constant": "#009E73", "mono": "#F0E442", "hybrid": "#B9B9B9"}
SPAN_COLOURS: Mapping[str, str] = {
    "needle": "#E69F00",
    "query": "#56B4E9",
    "generated": "#CC79A7",
    "distractor": "#8468D8",
    "answer": "#009E73",
    "prefix": "#0072B2",
    "rest": "#B9B9B9",
}
_OTHER_SPANS = ("#009E73", "#0072B2", "#F0E442", "#D55E00", "#804020", "#4B2BD6")
_PART_SHADES = {"key": 0.7, "value": 0.5}
_UNKNOWN = "#5A5A5A"

_SETTINGS: Mapping[str, Any] = {
    **mpl.rc_params_from_file(
        Path(__file__).with_name("paper.mplstyle"), use_default_template=False
    ),
    # An SVG viewer without the other fonts falls back to sans-serif.
    "font.family": [*FONTS, "sans-serif"],
}
# None drops an entry: dates and versions would change the bytes of an equal figure.
_METADATA: Mapping[str, Mapping[str, None]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "ModDate": None, "Creator": None, "Producer": None},
}
FORMATS = tuple(_METADATA)
"""The formats of figures."""


class PaperFigure(Figure):
    """A matplotlib figure that is saved in this style and shows itself in a notebook.

    It is saved with embedded fonts and without dates.
    """

    caption = ""
    """A sentence for the page, if the name of the figure does not describe it."""

    def suptitle(self, t: str, **kwargs: Any) -> Text:
        """Write the title above the figure; lines wrap at the width of the figure."""
        letters = int(LETTERS_PER_INCH * self.get_figwidth())
        return super().suptitle("\n".join(fill(line, letters) for line in t.split("\n")), **kwargs)

    def savefig(self, fname: Any, **options: Any) -> None:
        """Save as matplotlib does. The format follows the name unless `format` is given."""
        suffix = options.get("format") or (
            Path(fname).suffix.lstrip(".") if isinstance(fname, str | Path) else "png"
        )
        metadata = {**_METADATA.get(suffix, {}), **options.pop("metadata", {})}
        with style(), _laid_out(self):
            super().savefig(fname, metadata=metadata, **options)

    def _repr_png_(self) -> bytes:
        return rendered(self, ("png",), dpi=150)["png"]


# `rc_context` can be entered only once, and must see the caller's rcParams at the call. So the
# decorator makes a new style for every call.
class Style:
    """The paper style, as a context or a decorator; see `style`."""

    def __init__(self) -> None:
        self._context = mpl.rc_context(cast(Any, _settings()))

    def __enter__(self) -> None:
        self._context.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._context.__exit__(*raised)

    def __call__(self, draw: Callable[..., Drawn]) -> Callable[..., Drawn]:
        """`draw` in this style, with the further arguments `ax` and `figsize`."""

        @wraps(draw)
        def drawn(*arguments: Any, ax: Any = None, figsize: Any = None, **keywords: Any) -> Any:
            # A drawing function may call another one, which then uses the caller's `ax` or
            # `figsize`.
            before = _ASKED.set(
                _ASKED.get() if ax is None and figsize is None else _asked(ax, figsize)
            )
            try:
                with style():
                    figure = draw(*arguments, **keywords)
                    # Only the outermost function, which got `ax`, returns the axes. An inner
                    # function returns the stand-in, which its caller uses as a figure.
                    return (
                        figure.finish()
                        if isinstance(figure, _OnAxes) and ax is not None
                        else figure
                    )
            except (TypeError, ValueError, LookupError) as error:
                if isinstance(error, InputError) or not _compares(arguments):
                    raise
                raise InputError(
                    f"{draw.__name__} cannot draw a comparison ({one_line(error, 80)}); give one "
                    "of its runs, such as comparison.isel(run=0)"
                ) from error
            finally:
                _ASKED.reset(before)

        return drawn


def _compares(arguments: tuple) -> bool:
    """Whether an argument is a tree of runs joined by `compare`."""
    tree = arguments[0] if arguments else None
    return isinstance(tree, xr.DataTree) and any("run" in node.dims for node in tree.subtree)


def style() -> Style:
    """Draw in the paper style inside this context.

    As a decorator, it covers a whole function that makes its figure by `paper_figure`; this
    function then takes `ax` and `figsize` too.

    Returns:
        A context manager that is also a decorator.
    """
    return Style()


def _settings() -> dict[str, Any]:
    """The settings of the style that the user has not changed.

    Text sizes are the user's; our fonts draw characters that are missing in the user's fonts.
    """
    known, default = cast(Any, mpl.rcParams), cast(Any, mpl.rcParamsDefault)
    # A default that the user set on purpose is not distinguishable from an unset one.
    settings = {name: value for name, value in _SETTINGS.items() if known[name] == default[name]}
    if "font.size" not in settings and known["font.size"] != _SETTINGS["font.size"]:
        larger = known["font.size"] / _SETTINGS["font.size"]
        settings |= {
            name: larger * value
            for name, value in settings.items()
            if name.endswith(("titlesize", "labelsize", "fontsize"))
        }
    if not {"font.family", "font.sans-serif"} <= settings.keys():
        settings["font.family"] = list(dict.fromkeys([*known["font.family"], *FONTS]))
    return settings


_ASKED: ContextVar[Axes | tuple[float, float] | None] = ContextVar("asked", default=None)
"""The axes, or the size in inches, that the caller requested."""


def _asked(ax: Any, figsize: Any) -> Axes | tuple[float, float]:
    """Raises InputError for values that are no axes and no size, and for both together."""
    if ax is None:
        return checked(figsize, tuple[Inches, Inches], "figsize")
    if figsize is not None or not isinstance(ax, Axes):
        came = "also figsize" if isinstance(ax, Axes) else quoted(ax)
        raise InputError(
            f"as ax, one matplotlib Axes was wanted, with the size that it has; got {came}"
        )
    return ax


class _OnAxes:
    """Stand-in for a figure that draws on the caller's axes.

    It puts on the axes the things that a figure with a single axes has around them.
    """

    def __init__(self, ax: Axes) -> None:
        self.ax = ax
        # The axes may be in a subfigure, which has no size in inches.
        self.figure = cast(Figure, ax.get_figure(root=True))
        self.colorbar = self.figure.colorbar
        self.caption = ""

    def subplots(self, *panels: Any, **options: Any) -> Axes:
        """Return the axes. Raises InputError for several panels."""
        return self.add_gridspec() if panels else self.ax

    def add_gridspec(self, *panels: Any, **options: Any) -> NoReturn:
        """Raises InputError, since a grid has several axes."""
        raise InputError(
            "this figure may have several axes, so that yours cannot hold it; leave ax out, "
            "and give figsize=(width, height)"
        )

    subfigures = add_gridspec

    def suptitle(self, text: str, **options: Any) -> None:
        """The title of the axes."""
        self.ax.set_title(text)

    def supxlabel(self, text: str) -> None:
        """The label of the x axis."""
        self.ax.set_xlabel(text)

    def supylabel(self, text: str) -> None:
        """The label of the y axis."""
        self.ax.set_ylabel(text)

    def gca(self) -> Axes:
        """The axes."""
        return self.ax

    def legend(self, **options: Any) -> None:
        """Draw a legend below the axes and their labels, with space by a constrained layout."""
        # Inches from the axes down to the lowest label: the legend must not cover tick labels.
        depth = (self.finish().bbox.y0 - cast(Any, self.ax.get_tightbbox()).y0) / self.figure.dpi
        below = self.ax.transAxes + ScaledTranslation(0, -depth, self.figure.dpi_scale_trans)
        self.ax.legend(
            **{
                **options,
                "loc": "upper center",
                "bbox_to_anchor": (0.5, 0),
                "bbox_transform": below,
            }
        )

    def get_figwidth(self) -> float:
        """Width of the axes in inches."""
        return self.ax.bbox.width / self.figure.dpi

    def finish(self) -> Axes:
        """Return the axes after making the tick labels.

        Labels made later would only have the caller's fonts, and dollars would be mathematics.
        """
        for label in [
            *self.ax.get_xticklabels(which="both"),
            *self.ax.get_yticklabels(which="both"),
        ]:
            label.set(parse_math=False, fontfamily=mpl.rcParams["font.family"])
        return self.ax


def paper_figure(width: float = PAGE_WIDTH, height: float = 2.4) -> PaperFigure:
    """Make an empty figure that is laid out by its content.

    Call it inside `style()`, or in a function decorated by `@style()`; the arguments `ax` and
    `figsize` of that function then apply.

    Args:
        width: Width in inches.
        height: Height in inches.

    Returns:
        The figure.
    """
    asked = _ASKED.get()
    if isinstance(asked, Axes):
        return cast(Any, _OnAxes(asked))
    layout = ConstrainedLayoutEngine(w_pad=0.03, h_pad=0.03, wspace=0.03, hspace=0.03)
    figure = PaperFigure(figsize=asked or (width, height), layout=layout)
    # The canvas attaches itself; without one there is no renderer that could measure texts.
    FigureCanvasAgg(figure)
    return figure


def save_figure(
    figure: Figure, stem: str | Path, formats: str | Sequence[str] | None = None
) -> list[Path]:
    """Write a figure to files.

    A figure drawn again from the same data gives the same bytes.

    Args:
        figure: Figure to write.
        stem: Path, with or without the suffix of a format.
        formats: One or several of png, svg and pdf; None: from the suffix, else png.

    Returns:
        Paths of the files.

    Raises:
        InputError: A format is not one of `FORMATS`, the suffix belongs to another format, or
            `figure` is no figure.
    """
    if not isinstance(figure, Figure):
        raise InputError(f"a figure was wanted; got {quoted(figure)}")
    path = path_of(stem, "a file for the figure")
    suffix = path.suffix.lstrip(".").lower()
    # In stems such as head_0.5, the text after the last dot is no format
    named = suffix if suffix in FigureCanvasAgg.get_supported_filetypes() else None
    contents = rendered(figure, (named or FORMATS[0]) if formats is None else formats)
    if named is None:
        return write_pictures(contents, path)
    if named not in contents:
        raise InputError(
            f"{one_line(path, 80)} ends in .{suffix}, and {', '.join(contents)} was asked for; "
            "leave one of the two out"
        )
    # The given name, also in capitals
    files = {name: path if name == named else path.with_suffix(f".{name}") for name in contents}
    for name, content in contents.items():
        files[name].write_bytes(content)
    return [*files.values()]


def write_pictures(contents: Mapping[str, bytes], stem: str | Path) -> list[Path]:
    """Write the formats of a figure to files.

    Args:
        contents: Bytes by format, from `rendered`.
        stem: Path without the suffix.

    Returns:
        Paths of the files.
    """
    paths = [Path(f"{stem}.{name}") for name in contents]
    for path, content in zip(paths, contents.values(), strict=True):
        path.write_bytes(content)
    return paths


def rendered(figure: Figure, formats: Sequence[str] = FORMATS, **options: Any) -> dict[str, bytes]:
    """Render a figure in some formats, laid out once.

    Args:
        figure: Figure to render.
        formats: Any of png, svg and pdf.
        **options: Passed to matplotlib's `savefig`.

    Returns:
        Bytes by format.

    Raises:
        InputError: A format is not one of `FORMATS`.
    """
    formats = [formats] if isinstance(formats, str) else list(formats)
    if unknown := [name for name in formats if name not in FORMATS]:
        raise InputError(
            f"a figure is written as {', '.join(FORMATS)}; got {', '.join(map(str, unknown))}"
        )
    contents = {}
    with style(), _laid_out(figure):
        for name in formats:
            contents[name] = _written(figure, name, **options)
    return contents


def _written(figure: Figure, name: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    # Not `figure.savefig`, which would lay out a PaperFigure again for every format.
    Figure.savefig(figure, buffer, format=name, metadata=dict(_METADATA[name]), **options)
    return buffer.getvalue()


@contextmanager
def _laid_out(figure: Figure) -> Iterator[None]:
    """Lay `figure` out once for all formats.

    At the resolutions of formats, texts measure a little differently.
    """
    make_legible(figure)
    layout = figure.get_layout_engine()
    if layout is not None:
        layout.execute(figure)
    # with "none", a placeholder, matplotlib would draw everything once more before every format
    figure.set_layout_engine(None)
    try:
        yield
    finally:
        figure.set_layout_engine(layout)


def scheme_colour(scheme: str) -> str:
    """Return the color of a position scheme.

    Args:
        scheme: Scheme; a variant ("hope_ab1") has the color of its family.

    Returns:
        The color; dark gray for an unknown family.
    """
    return SCHEME_COLOURS.get(scheme, SCHEME_COLOURS.get(scheme.split("_")[0], _UNKNOWN))


def scheme_name(scheme: str) -> str:
    """Write a scheme as papers do: "repo" -> "RePo".

    Args:
        scheme: Scheme as a run names it.

    Returns:
        The name; an unknown scheme as it is.
    """
    return SCHEME_NAMES.get(scheme, scheme)


def span_colours(spans: Sequence[str]) -> dict[str, str]:
    """Choose a color for every span.

    Usual spans have fixed colors, others take the next free one, and a dotted part is darker than
    its parent.

    Args:
        spans: Names of spans; the same names in the same order give the same colors.

    Returns:
        Color by name.
    """
    colours: dict[str, str] = {}
    other = 0
    for top in dict.fromkeys(name.split(".")[0] for name in spans):
        if top in SPAN_COLOURS:
            colours[top] = SPAN_COLOURS[top]
        else:
            colours[top] = _OTHER_SPANS[other % len(_OTHER_SPANS)]
            other += 1
    for name in spans:
        if "." in name:
            colours[name] = darker(
                colours[name.split(".")[0]], _PART_SHADES.get(name.rsplit(".")[-1], 0.88)
            )
    return {name: colours[name] for name in spans}


def darker(colour: str, share: float = 0.7) -> str:
    """Darken a color.

    Args:
        colour: Color of matplotlib.
        share: Share of the light to keep.

    Returns:
        Color as hexadecimal text.
    """
    red, green, blue = to_rgb(colour)
    return to_hex((red * share, green * share, blue * share))
