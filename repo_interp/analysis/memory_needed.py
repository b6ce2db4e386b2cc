"""The memory that an analysis needs.

    bytes of a run  = the larger of the peak so far (loading)
                      and bytes held now + activations + statistics + drawing
    statistics      = 8 * layers * heads * tokens of all prompts
                      one number per token and head, such as its position

`models.pass_limits` has the bytes of a pass. This module knows nothing about prompts but their
lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from repo_interp.errors import InputError
from repo_interp.models.decoder import Decoder
from repo_interp.models.feed_forward import block_of
from repo_interp.models.pass_limits import bytes_per_token
from repo_interp.models.side_by_side import SideBySide
from repo_interp.runtime import processes
from repo_interp.runtime.memory import machine_memory

_BYTES_PER_TOKEN = 150
"""Of a prompt: its token as a number and as text."""
_DRAWING_BYTES = 110 * 2**20
"""Of drawing: the libraries that draw, and the figures and the page while they are made."""


def require_memory_for_run(
    decoder: Decoder, lengths: Sequence[int], size: SideBySide, passes: Sequence[int] = ()
) -> None:
    """Check that an analysis fits into memory; an accelerator's memory is not checked.

    Args:
        decoder: Decoder of the model.
        lengths: Tokens of every prompt.
        size: Prompts or tokens of a batch.
        passes: Tokens of every prompt in every pass of the experiments.

    Raises:
        InputError: It does not fit.
    """
    config, device = decoder.config, decoder.device
    if device.type != "cpu":
        return
    statistics = 8.0 * config.num_hidden_layers * config.num_attention_heads * sum(lengths)
    longest = max(lengths)
    together = min(len(lengths), size.of_length(longest))
    tokens = together * longest
    # The feed-forward part runs in blocks of tokens, so a long pass never has its full width
    wide = min(tokens, block_of(decoder.intermediate_size, device)) * decoder.intermediate_size
    activations = float(decoder.dtype.itemsize) * (8 * tokens * config.hidden_size + 3 * wide)
    # 20 bytes per logit, for experiments that read an answer: in float32 and twice in float64
    logits = 20.0 * config.vocab_size * max(passes, default=0) * together
    running = max(activations, logits) + statistics
    # Loading may have taken more than the analysis will.
    # Drawing begins when activations are gone, so of the two the larger one counts
    needed = max(_peak(), _held() + max(running, statistics + _DRAWING_BYTES))
    require_memory(needed * processes.local_count(), "this analysis")


def _held() -> float:
    """Bytes that this process holds now; its peak where the system does not say."""
    return _of_status("VmRSS") or _peak()


def require_memory(needed: float, work: str) -> None:
    """Check that a number of bytes fits into memory.

    Args:
        needed: Bytes.
        work: Name of the work, for the message.

    Raises:
        InputError: The machine has less memory.
    """
    present = machine_memory()
    if needed > present:
        raise InputError(
            f"{work} would need about {needed / 2**30:,.0f} GiB of memory, and there are "
            f"{present / 2**30:,.0f}; "
            "ask for fewer or shorter prompts"
        )


def require_memory_for_prompts(count: int, length: int) -> None:
    """Check that prompts fit into memory.

    Args:
        count: Number of prompts.
        length: Tokens of a prompt.

    Raises:
        InputError: They do not fit.
    """
    require_memory(_BYTES_PER_TOKEN * count * length, f"{count:,} prompts of {length:,} tokens")


def require_memory_for_pass(decoder: Decoder, tokens: int, prompts: int) -> None:
    """Check that a forward pass fits into memory; an accelerator's memory is not checked.

    A layer holds the residual stream, queries, keys, values and its feed-forward part; and a number
    for every pair of tokens where a scheme adds to the logits, or they are soft-capped.

    Args:
        decoder: Decoder of the model.
        tokens: Tokens of a prompt.
        prompts: Prompts in one pass.

    Raises:
        InputError: It does not fit.
    """
    if decoder.device.type == "cpu":
        every_pair = any(
            layer.position_logits is not None or layer.attn_logit_softcapping is not None
            for layer in decoder.layers
        )
        pairs = (
            decoder.config.num_attention_heads * decoder.dtype.itemsize * tokens
            if every_pair
            else 0
        )
        require_memory(
            tokens * prompts * (bytes_per_token(decoder) + pairs),
            f"a pass of {prompts} prompts of {tokens:,} tokens side by side",
        )


def _peak() -> float:
    """The most bytes that this process has held so far."""
    import resource
    import sys

    # getrusage counts bytes on macOS and KiB on Linux
    unit = 1 if sys.platform == "darwin" else 1024
    # VmHWM first: ru_maxrss keeps the peak of the process that forked this one, through an exec
    return _of_status("VmHWM") or float(unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def _of_status(field: str) -> float:
    """A size of this process from the kernel; 0.0 if the kernel has none."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0.0
    # A line reads "VmRSS:   123456 kB"
    return next(
        (1024.0 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), 0.0
    )
