"""The data sets that cannot come with the package, as a paper of its own: scores on the files that users give."""

from __future__ import annotations

from position_papers.data_sets.answers import ANSWERS
from position_papers.data_sets.questions import Options
from position_papers.kit.experiment import Paper
from repo_interp.tasks.data_sets import NAMES

PAPER = Paper(
    name="data-sets",
    title="Data sets that cannot come with the package",
    experiments=(ANSWERS,),
    options=Options,
    fast={"questions": 20},
    data_sets=tuple(NAMES),
)
