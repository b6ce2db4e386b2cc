"""Names of the package, for type checkers.

`__init__.py` reads them too, and imports a name when it is first used.
"""

from . import experiments as experiments
from . import explorer as explorer
from . import interventions as interventions
from . import measures as measures
from . import plots as plots
from . import tasks as tasks
from .analysis.ablation_effects import ablation_effects as ablation_effects
from .analysis.ablation_effects import head_means as head_means
from .analysis.analyze import analyze as analyze
from .analysis.coercion import prompt as prompt
from .analysis.coercion import tokens as tokens
from .analysis.score import score as score
from .analysis.score import score_needles as score_needles
from .comparison.align import compare as compare
from .errors import InputError as InputError
from .explorer import explore as explore
from .interventions import set_positions as set_positions
from .interventions.ablation import ablate as ablate
from .models.bridge import bridge as bridge
from .models.checkpoints import load_model as load_model
from .models.checkpoints import reposition as reposition
from .models.load import load as load
from .models.load import open_model as open_model
from .models.load import zoo as zoo
from .models.reposition import added_parameters as added_parameters
from .models.reposition import layout as layout
from .models.saving import save as save
from .models.scheme_registry import register_scheme as register_scheme
from .plots.findings import findings as findings
from .plots.pages.report import show as show
from .plugins.edits.pair_effects import pair_effects as pair_effects
from .plugins.edits.streaming_cache import StreamingCache as StreamingCache
from .plugins.edits.token_losses import loss as loss
from .plugins.edits.trials import try_edits as try_edits
from .plugins.head_tables.atlas_table import atlas as atlas
from .plugins.head_tables.head_numbers import head_table as head_table
from .plugins.one_head.one_head import attention_pattern as attention_pattern
from .plugins.one_head.one_head import explain_logit as explain_logit
from .plugins.paths.direct_logits import direct_logits as direct_logits
from .plugins.paths.path_effects import path_effects as path_effects
from .plugins.probe.position_probe import position_probe as position_probe
from .plugins.results.failing_cell import explain_cell as explain_cell
from .plugins.reuse.reuse_by_head import reuse_cost_by_head as reuse_cost_by_head
from .plugins.reuse.reuse_cost import reuse_cost as reuse_cost
from .plugins.training.measured_step import measure_step as measure_step
from .plugins.training.scalars import training_scalars as training_scalars
from .plugins.training.training import PositionsCallback as PositionsCallback
from .plugins.verify.audit import verify as verify
from .plugins.verify_batch.batch_audit import verify_batch as verify_batch
from .plugins.verify_cache.cache_audit import verify_cache as verify_cache
from .plugins.verify_scheme.scheme_audit import verify_scheme as verify_scheme
from .plugins.writers.logit_writers import logit_writers as logit_writers
from .plugins.writers.position_writers import position_writers as position_writers
from .run import read_run as read_run
from .run import write_run as write_run
from .runtime.memory import working_memory as working_memory
from .tasks.prompt.jsonl import read_prompts as read_prompts
from .tasks.prompt.jsonl import write_prompts as write_prompts

__version__: str
