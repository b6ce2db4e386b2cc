"""repo_interp: a microscope for token positions in attention.

    bridge  = ri.load("path, hub-id or niah/repo")            a TransformerBridge
    prompts = ri.tasks.niah(bridge.tokenizer, length=4096)    prompts with named token spans
    prompts = ri.prompt(text, bridge)                         one prompt from a text
    run     = ri.analyze(bridge, prompts)                     labeled results, one node per measure
    tokens, valid = ri.tokens(prompts, bridge)                arguments of bridge.run_with_cache
    ri.findings(run)                                          sentences about the run, with evidence
    ri.show(run)                                              its page in a cell of a notebook
    ri.explore(bridge, prompt)                                change positions in a notebook
    ri.head_table(run)                                        a pandas table, one row per head
    ri.atlas(run)                                             scores and names of heads ("atlas")
    ri.plots.position_lines(run, layer=5, head=1)
    scores  = ri.score(bridge)                                a run: scores in the task of training
    ri.explain_cell(scores, depth=50, length=512)             the heads behind a failing cell
    audited = ri.verify("path or hub-id")                     rotation, stated and measured
    audited = ri.verify_cache(bridge, tokens, cache)          positions of the keys of a cache
    costs = ri.reuse_cost(bridge, texts, chunk=(128, 208))    a chunk's cache at another offset

Names are imported on first use: importing the package loads neither torch nor transformers.
`__init__.pyi` lists all names.
"""

from __future__ import annotations

from typing import Any

from lazy_loader import attach_stub

from repo_interp import moved_modules
from repo_interp.runtime.collection import collection_paused

__version__ = "0.1.0"
moved_modules.install()
# `__init__.pyi` is read at runtime too, so that types and names cannot drift apart.
_find, __dir__, __all__ = attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    # The first name imports torch and transformers.
    with collection_paused():
        return _find(name)
