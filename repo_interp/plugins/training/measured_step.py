"""Measure a model after a step of its training, in place and without a copy.

    attach -> analyze a few prompts -> detach -> OUT/step-K/run.nc

Afterwards all modules, the configuration and torch's random state are restored, so that a training
that is measured gives the same bits as a training that is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
import xarray as xr
from accelerate.utils import extract_model_from_parallel
from torch import nn

from repo_interp.analysis.analyze import analyze
from repo_interp.analysis.coercion import Prompts, as_prompts
from repo_interp.errors import InputError
from repo_interp.measures.statistics import Measure
from repo_interp.models.decoder import as_decoder, require_model
from repo_interp.models.offloading import device_of
from repo_interp.models.reposition import with_layout
from repo_interp.models.wrapped import model_of
from repo_interp.plugins.loading_checks.parity import require_parity
from repo_interp.run import write_run
from repo_interp.runtime.processes import alone
from repo_interp.storage.files import path_of, require_directory
from repo_interp.values import CountOrNone, checked

_FUSED = ("eager", "sdpa")
"""Attention implementations for weights of any precision; others need the half precision of a
training step.
"""


def measure_step(
    model: nn.Module,
    step: int,
    prompts: Prompts,
    out: str | PathLike[str] | None = None,
    measures: Sequence[str | Measure] | None = None,
) -> xr.DataTree:
    """Measure prompts on a model after a step of its training.

        for step, batch in enumerate(batches):
            ...
            if step % 200 == 0:
                run = ri.measure_step(model, step, prompts, out="runs/mine")

    The model may be in training mode, under autocast, or hold gradients; its state does not change.
    A peft model is measured with its adapter; DistributedDataParallel and torch.compile are
    unwrapped.

    Args:
        model: Hugging Face decoder, stock or repositioned.
        step: Number of finished training steps.
        prompts: Token ids or Prompts; the model has no tokenizer.
        out: Directory; the run is written to `out`/step-K/run.nc. None: nothing is written.
        measures: Names and objects; None: the defaults of the command `analyze` for the model.

    Returns:
        The run.

    Raises:
        InputError: As `analyze`; or `reposition` refuses the decoder, or its weights are spread
            over processes (FSDP, ZeRO-3).
        NotFinite: All measures stopped.
    """
    step = checked(step, CountOrNone, "step")
    inner = inner_model(model)
    prompt_list = as_prompts(prompts, getattr(inner, "tokenizer", None))
    with undisturbed(inner), with_hook_sites(inner):
        inner.eval()
        # `as_before` restores the setting
        if inner.config._attn_implementation not in _FUSED:
            inner.config._attn_implementation = "sdpa"
        require_parity(as_decoder(inner))
        run = analyze(inner, prompt_list, measures, experiments=())
    return finished_run(run, inner, step, out)


def inner_model(model: nn.Module) -> Any:
    """Find the model inside wrappers.

    Args:
        model: Model, bridge, or a wrapper of one.

    Returns:
        The model, whose weights this process has.

    Raises:
        InputError: `model` is not a model, or its weights are spread over processes.
    """
    inner = (
        model
        if not isinstance(model, nn.Module)
        else extract_model_from_parallel(model, keep_torch_compile=False)
    )
    require_model(inner)
    inner = cast(Any, model_of(inner))
    _require_whole(inner)
    return inner


@contextmanager
def undisturbed(model: Any) -> Iterator[None]:
    """Compute for this process alone, in full precision; random numbers stay as they were.

    Args:
        model: The model.

    Yields:
        Nothing.
    """
    kind = device_of(model).type
    devices = sorted(
        {part.device.index or 0 for part in model.parameters() if part.device.type == kind}
    )
    forked: dict[str, Any] = (
        {"devices": devices, "device_type": kind} if kind != "cpu" else {"devices": []}
    )
    with (
        # Dropout of the next training step must draw the same numbers as without the callback
        torch.random.fork_rng(**forked),
        torch.autocast(kind, enabled=False),
        torch.no_grad(),
        # The other processes are in their training step and share no batches
        alone(),
    ):
        yield


@contextmanager
def with_hook_sites(model: Any) -> Iterator[None]:
    """Give a model hook sites inside a `with` block.

    Args:
        model: The model.

    Yields:
        Nothing.
    """
    with as_before(model):
        if not as_decoder(model).repositioned:
            # The same layout: a stock model keeps its positions, and only gets hook sites.
            with_layout(model, None)
        yield


def finished_run(
    run: xr.DataTree, model: Any, step: int, out: str | PathLike[str] | None
) -> xr.DataTree:
    """Name the step of a run, and write it.

    Args:
        run: Run of the step.
        model: The measured model.
        step: Number of finished training steps.
        out: Directory of the runs of the training; None: nothing is written.

    Returns:
        The run.
    """
    name = Path(getattr(model.config, "name_or_path", "") or "").name
    run.attrs |= {
        "training_step": step,
        "checkpoint": f"{name}/step-{step}" if name else f"step-{step}",
    }
    if out is not None:
        directory = run_directory(out) / f"step-{step}"
        directory.mkdir(parents=True, exist_ok=True)
        write_run(run, directory / "run.nc")
    return run


@contextmanager
def as_before(model: nn.Module) -> Iterator[None]:
    """Restore the modules and the configuration of a model after the context.

    Every module gets back its attributes, children, buffers and hooks, except hooks that were
    removed inside the context. Tensors are not copied, so the context must not change their values.

    Args:
        model: Model with a configuration.

    Yields:
        Nothing.
    """
    owners: list[Any] = [*model.modules(), model.config]
    kinds = type(model.config)
    # The attributes and, one level deeper, the dictionaries that torch keeps children, buffers and
    # hooks in, since those are changed in place
    before = [
        (
            owner,
            dict(vars(owner)),
            [
                # Hooks that their owner removed are not restored, such as those of another
                # interrupted evaluation.
                (table, {} if "_hooks" in name else dict(table), set(table))
                for name, table in vars(owner).items()
                if isinstance(table, dict)
            ],
        )
        for owner in owners
    ]
    try:
        yield
    finally:
        # `vars` lacks the class: `reposition` exchanged it on the object that the user's
        # model holds.
        model.config.__class__ = kinds  # pyright: ignore[reportAttributeAccessIssue]
        for owner, attributes, tables in before:
            for table, content, names in [(vars(owner), attributes, {*attributes}), *tables]:
                for name in [name for name in table if name not in names]:
                    del table[name]
                table.update(content)


def run_directory(given: str | PathLike[str]) -> Path:
    """Check a directory for the runs of a training.

    Args:
        given: Path from the user.

    Returns:
        The directory.

    Raises:
        InputError: `given` is not a path, or is not a directory.
    """
    directory = path_of(given, "a directory for the runs of a training")
    require_directory(directory)
    return directory


def _require_whole(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        # ZeRO-3 leaves empty parameters in place, and FSDP makes DTensors, which have a device mesh
        if parameter.numel() == 0 or hasattr(parameter, "device_mesh"):
            raise InputError(
                f"{name} is sharded over processes (FSDP, ZeRO-3), and only the first process "
                "measures; save checkpoints and analyze these"
            )
