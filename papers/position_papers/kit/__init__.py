"""Names for writing experiments of papers; their modules document them.

This package knows nothing about single papers.
"""

# ruff: noqa: F401
from position_papers.items import read_items
from position_papers.kit.cache import Cache
from position_papers.kit.charts import groups_of
from position_papers.kit.experiment import (
    Drawing,
    Experiment,
    Needs,
    Paper,
    asked_the_same,
    each,
    joined,
    together,
    trained_alike,
    without_checkpoints,
)
from position_papers.kit.judge.claims import Claim, Evidence, evidence, unmeasured
from position_papers.kit.judge.differences import (
    MATERIAL,
    NORMAL_95,
    Difference,
    Sample,
    between,
    between_rises,
    in_words,
    mean_of,
    numbers_of,
    paired_difference,
    paired_seeds,
    rise,
    share_difference,
    welch_difference,
)
from position_papers.kit.judge.rules import (
    Above,
    All,
    AtLeast,
    AtMost,
    Below,
    BeyondNull,
    Custom,
    NotBelow,
    Observed,
    Rule,
    Significant,
    Values,
    Where,
    beside_null,
    limit,
)
from position_papers.kit.learned_positions import why_not
from position_papers.kit.perplexities import (
    compared,
    on_the_same_windows,
    perplexity_table,
    shortest_and_longest,
)
from position_papers.kit.scale import Scale
from position_papers.kit.score_figures import (
    draw_scores,
    handles,
    method_panels,
    score_by_length,
    score_panels,
)
from position_papers.kit.scores import (
    PLAIN,
    Scored,
    ScoreOptions,
    first_of,
    in_layers,
    in_legend,
    missing,
    named_layout,
    note,
    of_tasks,
    sample_table,
    score_subject,
    score_table,
    scores_on_record,
    with_methods,
)
from position_papers.kit.seeds import over_seeds
from position_papers.kit.subjects import VARIANT, Subject, records_of, seeds_of
