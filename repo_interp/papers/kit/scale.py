"""How large a model is and how long it was trained: the papers', as they state it, beside ours, as its files say it.

Knows nothing about what is claimed or measured.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from repo_interp.models.checkpoints import identify
from repo_interp.models.families import training_length
from repo_interp.training.trained import configured_task, trained_configuration


@dataclass(frozen=True)
class Scale:
    """Of one model. None: not stated."""

    layers: int | None = None
    width: int | None = None
    length: int | None = None
    """Longest sequences it was trained on, in tokens."""
    training: str | None = None
    """Steps, sequences of a step, or tokens."""


_REPO = Scale(16, 2048, 4096, "50B tokens, continuing 4T")  # OLMo-2 1B; sec. 4.1
_REVERSAL = Scale(4)  # appendix C: a GPT-2 of 4 layers
_HOPE = Scale(12, 768, 512, "50,000 steps of 512 sequences")  # table 6
_COPE_LANGUAGE = Scale(12, 768, 1024, "100 epochs of 100M tokens")  # sec. 5.4
_POSITION_GENERALIZATION = Scale(28, 3072)  # Llama-3.2-3B
PAPERS: Mapping[str, Scale] = {
    **{f"R{number}": _REVERSAL if number in (1, 2, 3) else _REPO for number in range(1, 10)},
    **{f"H{number}": _HOPE for number in range(1, 8)},
    "C1": Scale(4, 256, None, "10,000 steps of 16 sequences"),  # sec. 5.1, appendix C
    "C2": Scale(2, 64, None, "100,000 steps"),  # sec. 5.2
    "C3": Scale(training="10,000 sequences of up to 512 operations"),  # sec. 5.3
    **{f"C{number}": _COPE_LANGUAGE for number in (4, 5, 6)},
    **{f"P{number}": _POSITION_GENERALIZATION for number in range(1, 8)},
}
"""By claim, the model that its paper makes it about."""


def scale_of(directory: str | os.PathLike[str]) -> Scale:
    """The scale of a checkpoint, or of a training record without weights, from config.json and training.toml."""
    directory = Path(directory)
    trained = trained_configuration(directory)
    found = Scale()
    if trained is not None:
        batch = trained.batch * trained.accumulation
        continued = ", continuing another" if trained.continue_from else ""
        training = f"{trained.steps:,} steps of {batch} {'sequence' if batch == 1 else 'sequences'}{continued}"
        found = Scale(trained.layers, trained.width, configured_task(trained).training_length, training)
    if (directory / "config.json").is_file() or not directory.exists():
        config = identify(directory).config
        found = Scale(config.num_hidden_layers, config.hidden_size, training_length(config), found.training)
    return found


def difference(ours: Scale, theirs: Scale) -> str:
    """One line: ours, then the paper's, as layers × width, length of sequences, training; what is not stated is left out."""
    return "; paper: ".join(filter(None, (_in_words(ours), _in_words(theirs))))


def _in_words(one: Scale) -> str:
    size = [f"{one.layers} layers"] * (one.layers is not None) + [f"width {one.width}"] * (one.width is not None)
    rest = [f"{one.length} tokens"] * (one.length is not None) + [one.training or ""] * (one.training is not None)
    return ", ".join([" × ".join(size)] * bool(size) + rest)
