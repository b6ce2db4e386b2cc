"""repo_interp: a microscope for token positions in attention.

    bridge  = ri.load("path, hub-id or niah/repo")            a transformer_lens TransformerBridge
    prompts = ri.tasks.niah(bridge.tokenizer, length=4096)    prompts with named token spans; or ri.prompt(text, bridge, ...)
    run     = ri.analyze(bridge, prompts)                     labelled results, one node per measure
    tokens, valid = ri.tokens(prompts, bridge)                what bridge.run_with_cache takes
    ri.findings(run)                                          what the run shows, in sentences with their evidence
    ri.show(run)                                              its page in a cell of a notebook
    ri.explore(bridge, prompt)                                change positions in a notebook, and see what follows
    ri.head_table(run)                                        a pandas table with one row per head
    ri.atlas(run)                                             ... with what heads are called, of experiments=("atlas",)
    ri.plots.position_lines(run, layer=5, head=1)
    scores  = ri.score(bridge)                                how well it answers the task it was trained on: a run too
    ri.explain_cell(scores, depth=50, length=512)             the heads behind a cell that fails
    audited = ri.verify("path or hub-id")                     whether a model rotates as its configuration says

Everything is imported when it is first asked for: importing the package loads neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "InputError": "repo_interp.errors",
    "PositionsCallback": "repo_interp.analysis.training",
    "ablate": "repo_interp.interventions.ablation",
    "ablation_effects": "repo_interp.analysis.ablation",
    "added_parameters": "repo_interp.models.reposition",
    "analyze": "repo_interp.analysis.analyze",
    "atlas": "repo_interp.analysis.atlas",
    "attention_pattern": "repo_interp.analysis.one_head",
    "bridge": "repo_interp.models.bridge",
    "compare": "repo_interp.comparison.align",
    "explain_cell": "repo_interp.analysis.failing_cell",
    "explain_logit": "repo_interp.analysis.one_head",
    "explore": "repo_interp.explorer",
    "findings": "repo_interp.plots.findings",
    "head_means": "repo_interp.analysis.ablation",
    "head_table": "repo_interp.analysis.heads",
    "layout": "repo_interp.models.reposition",
    "load": "repo_interp.models.load",
    "load_model": "repo_interp.models.checkpoints",
    "measure_step": "repo_interp.analysis.training",
    "prompt": "repo_interp.analysis.coercion",
    "read_prompts": "repo_interp.tasks.prompt.jsonl",
    "read_run": "repo_interp.run",
    "reposition": "repo_interp.models.checkpoints",  # which registers our format with Hugging Face's Auto classes
    "save": "repo_interp.models.checkpoints",
    "score": "repo_interp.analysis.score",
    "score_needles": "repo_interp.analysis.score",
    "set_positions": "repo_interp.interventions",
    "show": "repo_interp.plots.pages.report",
    "tokens": "repo_interp.analysis.coercion",
    "training_scalars": "repo_interp.analysis.training",
    "verify": "repo_interp.models.audit",
    "write_prompts": "repo_interp.tasks.prompt.jsonl",
    "write_run": "repo_interp.run",
    "zoo": "repo_interp.models.load",
}
_MODULES = {
    "experiments": "repo_interp.experiments",
    "explorer": "repo_interp.explorer",
    "interventions": "repo_interp.interventions",
    "measures": "repo_interp.measures",
    "plots": "repo_interp.plots",
    "tasks": "repo_interp.tasks",
}

__all__ = [
    "InputError",
    "PositionsCallback",
    "__version__",
    "ablate",
    "ablation_effects",
    "added_parameters",
    "analyze",
    "atlas",
    "attention_pattern",
    "bridge",
    "compare",
    "experiments",
    "explain_cell",
    "explain_logit",
    "explore",
    "explorer",
    "findings",
    "head_means",
    "head_table",
    "interventions",
    "layout",
    "load",
    "load_model",
    "measure_step",
    "measures",
    "plots",
    "prompt",
    "read_prompts",
    "read_run",
    "reposition",
    "save",
    "score",
    "score_needles",
    "set_positions",
    "show",
    "tasks",
    "tokens",
    "training_scalars",
    "verify",
    "write_prompts",
    "write_run",
    "zoo",
]

if TYPE_CHECKING:
    from repo_interp import experiments, explorer, interventions, measures, plots, tasks
    from repo_interp.analysis.ablation import ablation_effects, head_means
    from repo_interp.analysis.analyze import analyze
    from repo_interp.analysis.atlas import atlas
    from repo_interp.analysis.coercion import prompt, tokens
    from repo_interp.analysis.failing_cell import explain_cell
    from repo_interp.analysis.heads import head_table
    from repo_interp.analysis.one_head import attention_pattern, explain_logit
    from repo_interp.analysis.score import score, score_needles
    from repo_interp.analysis.training import PositionsCallback, measure_step, training_scalars
    from repo_interp.comparison.align import compare
    from repo_interp.errors import InputError
    from repo_interp.explorer import explore
    from repo_interp.interventions import set_positions
    from repo_interp.interventions.ablation import ablate
    from repo_interp.models.audit import verify
    from repo_interp.models.bridge import bridge
    from repo_interp.models.checkpoints import load_model, save
    from repo_interp.models.load import load, zoo
    from repo_interp.models.reposition import added_parameters, layout, reposition
    from repo_interp.plots.findings import findings
    from repo_interp.plots.pages.report import show
    from repo_interp.run import read_run, write_run
    from repo_interp.tasks.prompt.jsonl import read_prompts, write_prompts


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        value = getattr(import_module(_WHERE[name]), name)
    elif name in _MODULES:
        value = import_module(_MODULES[name])
    else:
        raise AttributeError(f"module 'repo_interp' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
