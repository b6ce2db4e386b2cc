"""`repo-interp train steps RUN` (`repo-interp steps RUN` still works): measure the saved steps of a
training run.

The steps are measured once; the results are kept in one small file next to the run's checkpoint.
"""

from __future__ import annotations

import argparse

from repo_interp.cli.arguments import count, seed

SUMMARY = (
    "Measure the saved steps of a training run (variance by rotary component, HoPE "
    "fig. 3b) and store the result with the checkpoint."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "run",
        metavar="RUN",
        help="directory of a training run with --checkpoint-every, which has steps/",
    )
    parser.add_argument(
        "--sequences",
        type=count,
        default=64,
        metavar="N",
        help="random sequences at each step (default: 64)",
    )
    parser.add_argument(
        "--repeats",
        type=count,
        default=4,
        metavar="N",
        help="independent replicates, at least 2 (default: 4)",
    )
    parser.add_argument(
        "--batch-size",
        type=count,
        default=8,
        metavar="N",
        help="sequences in one forward pass (default: 8)",
    )
    parser.add_argument("--seed", type=seed, default=0, help="seed of the sequences (default: 0)")
    parser.add_argument(
        "--device",
        default="auto",
        help="device of the models: cpu, cuda, cuda:1, mps (default: auto: cuda, else cpu)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure the saved steps and write the results."""
    from position_papers.hope.over_training import read_steps, write_steps
    from position_papers.hope.replicates import Sampling
    from repo_interp.models.checkpoints import device_named
    from repo_interp.runtime.console import Console, bold
    from repo_interp.runtime.progress import steps

    console = Console()
    arguments.device = str(device_named(arguments.device))
    counts = dict.fromkeys(
        ("sequences", "repeated_sequences", "step_sequences"), arguments.sequences
    )
    options = {
        name: getattr(arguments, name) for name in ("repeats", "batch_size", "seed", "device")
    }
    sampling = Sampling(**counts, **options)
    with steps(console) as step:
        step("measuring the saved steps")
        file = write_steps(arguments.run, sampling)
    measured = read_steps(arguments.run)
    assert measured is not None
    console.print(
        bold(
            file,
            f"  variance by component at {measured.sizes['step']} steps, on {arguments.device}",
        ),
        highlight=False,
    )
    return 0
