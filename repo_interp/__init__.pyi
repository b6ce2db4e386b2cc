"""The names of the package, for type checkers, and for `__init__.py`, which imports each when it is
first asked for.
"""

from repo_interp import experiments as experiments
from repo_interp import explorer as explorer
from repo_interp import interventions as interventions
from repo_interp import measures as measures
from repo_interp import plots as plots
from repo_interp import tasks as tasks
from repo_interp.analysis.ablation import ablation_effects as ablation_effects
from repo_interp.analysis.ablation import head_means as head_means
from repo_interp.analysis.analyze import analyze as analyze
from repo_interp.analysis.atlas import atlas as atlas
from repo_interp.analysis.coercion import prompt as prompt
from repo_interp.analysis.coercion import tokens as tokens
from repo_interp.analysis.failing_cell import explain_cell as explain_cell
from repo_interp.analysis.heads import head_table as head_table
from repo_interp.analysis.one_head import attention_pattern as attention_pattern
from repo_interp.analysis.one_head import explain_logit as explain_logit
from repo_interp.analysis.score import score as score
from repo_interp.analysis.score import score_needles as score_needles
from repo_interp.analysis.training import PositionsCallback as PositionsCallback
from repo_interp.analysis.training import measure_step as measure_step
from repo_interp.analysis.training import training_scalars as training_scalars
from repo_interp.comparison.align import compare as compare
from repo_interp.errors import InputError as InputError
from repo_interp.explorer import explore as explore
from repo_interp.interventions import set_positions as set_positions
from repo_interp.interventions.ablation import ablate as ablate
from repo_interp.memory import working_memory as working_memory
from repo_interp.models.audit import verify as verify
from repo_interp.models.bridge import bridge as bridge
from repo_interp.models.checkpoints import load_model as load_model
from repo_interp.models.checkpoints import reposition as reposition
from repo_interp.models.checkpoints import save as save
from repo_interp.models.load import load as load
from repo_interp.models.load import open_model as open_model
from repo_interp.models.load import zoo as zoo
from repo_interp.models.reposition import added_parameters as added_parameters
from repo_interp.models.reposition import layout as layout
from repo_interp.plots.findings import findings as findings
from repo_interp.plots.pages.report import show as show
from repo_interp.run import read_run as read_run
from repo_interp.run import write_run as write_run
from repo_interp.tasks.prompt.jsonl import read_prompts as read_prompts
from repo_interp.tasks.prompt.jsonl import write_prompts as write_prompts

__version__: str
