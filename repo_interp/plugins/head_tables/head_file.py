"""Files of the atlas of heads: with provenance, and in the formats of two libraries.

    to_json, to_parquet     every column, and `attrs`: model, digest of its weights, dtype, prompts;
                            rules, thresholds and nulls of names
    to_duo_attention        full_attention_heads.tsv [layer, key-value head] in 0 .. 1, and
                            config.json, of DuoAttention (Xiao et al. 2024)
    to_retrieval_head       {"LAYER-HEAD": [score]}, of Retrieval_Head (Wu et al. 2024)

A key-value head gets the largest score of the query heads that share it. The formats of the two
libraries have no missing scores, so a table with a missing score is refused. This module knows
nothing about how heads were measured.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from repo_interp.errors import InputError
from repo_interp.positions.layouts import NO_ATTENTION
from repo_interp.storage.files import write_text
from repo_interp.storage.json_values import as_json
from repo_interp.values import Tokens, TokensOrNone, checked

SCORE = "retrieval"
"""Default column for the formats of other libraries."""


class HeadTable(pd.DataFrame):
    """One row per head: a pandas DataFrame that writes itself for other libraries.

    `attrs` hold the provenance.
    """

    # pandas uses it to build the results of filters and sorts, so they keep these methods
    @property
    def _constructor(self) -> type[HeadTable]:
        return HeadTable

    def to_json(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, path_or_buf: str | os.PathLike[str] | None = None, **options: Any
    ) -> str | None:
        """Write or return {"attrs": `attrs`, "heads": a record per row}.

        Args:
            path_or_buf: File to write; None: the text is returned.
            **options: Options of pandas, which then writes its format.

        Returns:
            The text, or None if a file was written.
        """
        if options:
            return super().to_json(path_or_buf, **options)
        # By pandas, which writes numpy's numbers, and NaN as null
        heads = json.loads(super().to_json(orient="records") or "[]")
        text = (
            json.dumps(
                {"attrs": self.attrs, "heads": heads}, indent=1, ensure_ascii=False, allow_nan=False
            )
            + "\n"
        )
        if path_or_buf is None:
            return text
        write_text(Path(path_or_buf), text)
        return None

    def to_duo_attention(
        self,
        directory: str | os.PathLike[str],
        score: str = SCORE,
        sink_size: int = 128,
        recent_size: int = 256,
    ) -> Path:
        """Write full_attention_heads.tsv and config.json for DuoAttention and kvpress.

        Scores are cut to 0 .. 1; layers without attention have 0.

        Args:
            directory: Directory of the files, created if needed.
            score: Column to write.
            sink_size: Tokens that other heads keep at the beginning.
            recent_size: Tokens that other heads keep at the end.

        Returns:
            The path of full_attention_heads.tsv.

        Raises:
            InputError: A size is not a number of tokens, the table lacks the column, or a head or a
                layer has no score.
        """
        sizes = {
            "sink_size": checked(sink_size, TokensOrNone, "sink_size"),
            "recent_size": checked(recent_size, Tokens, "recent_size"),
        }
        by_head = self._of_all_heads(score)
        scores = (
            # [layer, kv_head, query head of it]: heads that share a key-value head are neighbors
            np.clip(by_head, 0, 1).reshape(len(by_head), int(self.attrs["kv_heads"]), -1).max(-1)
        )
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        write_text(directory / "config.json", json.dumps(sizes) + "\n")
        lines = ("\t".join(f"{value:.6g}" for value in row) for row in scores)
        write_text(directory / "full_attention_heads.tsv", "\n".join(lines) + "\n")
        return directory / "full_attention_heads.tsv"

    def to_retrieval_head(self, file: str | os.PathLike[str], score: str = SCORE) -> Path:
        """Write {"LAYER-HEAD": [score]}, as Retrieval_Head reads it.

        Args:
            file: File to write.
            score: Column to write.

        Returns:
            The path of the file.

        Raises:
            InputError: The table lacks the column, or a head or a layer has no score.
        """
        by_head = self._of_all_heads(score)
        places = zip(self["layer"], self["head"], strict=True)
        named = {f"{layer}-{head}": [float(by_head[layer, head])] for layer, head in places}
        write_text(Path(file), json.dumps(named) + "\n")
        return Path(file)

    def _of_all_heads(self, score: str) -> np.ndarray:
        """Return the column `score` as [layer, head], 0 in layers without attention.

        Raises InputError if a head of another layer has no score.
        """
        if score not in self.columns or self[score].dtype.kind != "f":
            columns = ", ".join(str(name) for name, kind in self.dtypes.items() if kind.kind == "f")
            raise InputError(
                f"the atlas has no numbers {score!r}; it has {columns}. retrieval needs "
                "prompts that mark an answer and its source"
            )
        if not {"layout", "heads", "kv_heads"} <= self.attrs.keys():
            raise InputError(
                "the table does not say how many heads the model has; analyze with the "
                "experiment atlas"
            )
        layout, heads = str(self.attrs["layout"]).split(","), int(self.attrs["heads"])
        # NaN first: a head that is missing in the table must not get score 0
        by_head = np.full((len(layout), heads), np.nan)
        by_head[[scheme == NO_ATTENTION for scheme in layout]] = 0.0
        attending = int(np.isnan(by_head).sum())
        by_head[self["layer"], self["head"]] = self[score]
        absent = [f"L{layer} H{head}" for layer, head in np.argwhere(~np.isfinite(by_head))]
        # A repeated row fills no new cell, so it shows only in the number of rows
        if absent or len(self) != attending:
            raise InputError(
                f"wanted a row with {score} for each of {attending} heads; the atlas has "
                f"{len(self)} rows, and {len(absent)} heads have "
                f"none ({', '.join(absent[:3])}): analyze all layers and heads, keep all "
                "rows, or name a score that all heads have"
            )
        return by_head


def provenance(run: xr.DataTree) -> dict[str, Any]:
    """Return the attributes of a run, and the rules of the names in its atlas, for JSON.

    Args:
        run: Run of `analyze`.

    Returns:
        Attributes by name. `names`: rule, threshold and nulls per name, if the run has an atlas.
    """
    named = {str(name): value for name, value in run.attrs.items()}
    attributes = {
        name: value
        for name, value in named.items()
        if not name.startswith("version_") and name not in ("asked", "notes")
    }
    attributes["version_repo_interp"] = run.attrs.get("version_repo_interp", "")
    attributes["layers"] = len(str(run.attrs["layout"]).split(",")) if "layout" in run.attrs else 0
    if "atlas" not in run.children:
        return as_json(attributes)
    group = run["atlas"].to_dataset()
    names = {
        str(label): {
            "rule": str(group["rule"].sel(label=label).values),
            "threshold": float(group["threshold"].sel(label=label)),
            "nulls": group["null"].sel(label=label).values.tolist(),
        }
        for label in group["label"].values
    }
    attributes["heads"] = group.sizes["head"]  # older groups have no such attribute
    return as_json(
        {
            **attributes,
            **{name: value for name, value in group.attrs.items() if name != "prompts"},
            "names": names,
        }
    )
