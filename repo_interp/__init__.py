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

Everything is imported when it is first asked for: importing the package loads neither torch nor
transformers. `__init__.pyi` lists it.
"""

from __future__ import annotations

from lazy_loader import attach_stub

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
