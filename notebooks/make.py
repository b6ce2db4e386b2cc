"""Runs the notebooks of this folder from a clean kernel and keeps what they show: `make notebooks`, or `python notebooks/make.py FILE...`.

A kernel is offline - opening a connection is an error - and every warning is one. Outputs are the same bytes each time on the same
machine: no times, no versions, pictures with a palette. `tests/test_notebooks.py` runs them again and compares.
"""

from __future__ import annotations

import base64
import io
import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell
from PIL import Image

HERE = Path(__file__).parent
NOTEBOOKS = tuple(sorted(HERE.glob("*.ipynb")))
NEEDS = {"9_the_heads_of_a_real_model": "smollm2-135m"}
"""Notebooks that need a model which does not come with the package, by its name for `repo-interp fetch`."""
LONG = ("8_breaking_and_fixing_heads", "9_the_heads_of_a_real_model")
"""Notebooks that take most of a minute or more: the test suite runs them when it is asked for all."""
COLOURS = 256
"""Of a picture's palette: figures are flat, and so a picture stays small."""
SECONDS = 300
"""A cell that takes longer is broken, on the slowest of machines."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
}
CLEAN = """
def _clean():
    import socket, warnings

    def refuse(*arguments, **named):
        raise OSError("a notebook works offline")

    socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", module="ipykernel")  # of the kernel itself, when it ends

_clean()
del _clean
"""
"""What a kernel runs before the first cell."""


def missing(path: Path) -> str | None:
    """One line that says what the notebook at `path` lacks on this machine; None where it can run."""
    from repo_interp.errors import InputError
    from repo_interp.models.fetched import fetched_directory

    try:
        fetched_directory(NEEDS.get(path.stem, ""))
    except InputError as error:
        return f"{path.name} is left as it is: {error}"
    return None


def executed(notebook: NotebookNode) -> NotebookNode:
    """`notebook` with the outputs of a clean kernel. Raises nbclient's CellExecutionError where a cell fails or warns."""
    notebook.cells.insert(0, new_code_cell(CLEAN))
    client = NotebookClient(
        notebook, timeout=SECONDS, kernel_name="python3", record_timing=False, resources={"metadata": {"path": str(HERE)}}
    )
    client.execute(env={**os.environ, **ENVIRONMENT})
    del notebook.cells[0]
    return tidied(notebook)


def tidied(notebook: NotebookNode) -> NotebookNode:
    """`notebook` without what a run leaves beside its outputs: times, versions, widgets; pictures made small."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    executions = 0
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number}", {}
        if cell.cell_type != "code":
            continue
        executions += 1
        cell.execution_count = executions
        cell.outputs = joined(cell.outputs)
        for output in cell.outputs:
            output.pop("transient", None)
            if "execution_count" in output:
                output.execution_count = executions
            if "data" in output:
                output.metadata = {}
                if "image/png" in output.data:
                    output.data["image/png"] = small(output.data["image/png"])
    return notebook


def joined(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """`outputs` with what was printed in one piece: a kernel sends it in as many as time allows."""
    whole: list[NotebookNode] = []
    for output in outputs:
        if whole and output.output_type == "stream" == whole[-1].output_type and output.name == whole[-1].name:
            whole[-1].text += output.text
        else:
            whole.append(output)
    return whole


def small(picture: str) -> str:
    """A PNG in base64 with a palette; one that has a palette stays as it is."""
    image = Image.open(io.BytesIO(base64.b64decode(picture)))
    if image.mode == "P":
        return picture
    buffer = io.BytesIO()
    image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(buffer, format="png", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


def main(files: list[str]) -> None:
    """Run `files`, or all, and write them."""
    for path in map(Path, files) if files else NOTEBOOKS:
        lacking = missing(path)
        sys.stdout.write(f"{lacking or path.name}\n")
        if lacking is not None:
            continue
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(executed(notebook))
        nbformat.write(notebook, path)


if __name__ == "__main__":
    main(sys.argv[1:])
