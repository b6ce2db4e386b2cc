"""The parts of all views: charts, looks, axes, legends, array helpers, tables.

This package knows arrays and axes.
"""

from repo_interp.plots.marks.arrays import (
    FEWEST,
    digits_of,
    fences,
    focused_range,
    global_range,
    heads_of,
    heads_where,
    nanmean,
    nested_digits,
    over_prompts,
    ranked_heads,
    shared_rows,
    strongest_head,
)
from repo_interp.plots.marks.axis_scales import (
    name_columns,
    name_ticks,
    plain_decades,
    signed_decades,
    sparse_ticks,
)
from repo_interp.plots.marks.beside import charts_of
from repo_interp.plots.marks.chart import Chart, CustomFigure, Drawing, figures_of_heads
from repo_interp.plots.marks.dot_chart import Dots
from repo_interp.plots.marks.drawing import (
    bare,
    colour_bar,
    contiguous,
    counted,
    envelope,
    legend_below,
    lone_entry,
    note,
    number,
    panels,
    say,
    scheme_handles,
    scheme_swatches,
)
from repo_interp.plots.marks.finding import (
    Finding,
    heads_named,
    layers_named,
    over,
    percent,
    runner_up,
)
from repo_interp.plots.marks.head_charts import (
    HeadArrows,
    HeadCurves,
    HeadImage,
    HeadNumber,
    HeadRows,
    NextTokens,
    PromptRows,
)
from repo_interp.plots.marks.head_map import (
    CONTROL,
    HeadDots,
    Heads,
    head_rows,
    layer_table,
)
from repo_interp.plots.marks.line_chart import Lines
from repo_interp.plots.marks.map_chart import RunMaps
from repo_interp.plots.marks.panels import MISSING, Panels, colour_map, draw_cells
from repo_interp.plots.marks.reading import (
    BACKGROUND,
    PromptTokens,
    checkpoint_name,
    described_prompts,
    first_prompt,
    group,
    has_groups,
    head_axes,
    layer_colour,
    layer_scheme,
    learned_layers,
    learned_schemes,
    ordered_spans,
    pick,
    prompt_tokens,
    schemes,
    unit_label,
)
from repo_interp.plots.marks.result_figure import (
    bar_lengths,
    look_around_zero,
    name_rows_down,
    require_result,
)
from repo_interp.plots.marks.runs import (
    BESIDE,
    Runs,
    by_scheme,
    evenly_spaced,
    has_runs,
    runs_of,
    runs_with_values,
    with_run_axis,
)
from repo_interp.plots.marks.table import Cell, Table, cells, format_cell, table_of
from repo_interp.plots.marks.token_axis import (
    label_tokens,
    part_ribbon,
    shade_spans,
    span_handles,
    token_label,
)
