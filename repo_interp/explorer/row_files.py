"""The numbers of a row (`Session.look`, `Session.changed`) as files.

as_csv       positions, weights and logits: a line per state, head and token
as_netcdf    all numbers, with the cell that computes them
"""

from __future__ import annotations

from collections.abc import Sequence

import xarray as xr

from repo_interp.explorer.session_edits import Edit


def as_csv(seen: xr.Dataset) -> bytes:
    """Write positions, weights and logits as CSV.

    Args:
        seen: Result of `Session.look` or `Session.changed`.

    Returns:
        Content of the file.
    """
    table = seen[["position", "weight", "logit"]].rename(key="token_of_key")
    rows = xr.merge(
        [
            table["position"],
            *(table[name].rename(token_of_key="token") for name in ("weight", "logit")),
        ],
        compat="override",
    )
    return rows.to_dataframe().reset_index().to_csv(index=False, lineterminator="\n").encode()


def as_netcdf(seen: xr.Dataset, cell: str, token: int, edits: Sequence[Edit]) -> bytes:
    """Write all numbers as netCDF, with their origin as attributes.

    Args:
        seen: Result of `Session.look` or `Session.changed`.
        cell: Result of `Session.as_python`.
        token: The query token.
        edits: Edits that are on.

    Returns:
        Content of the file.
    """
    # netCDF has no attribute without a value
    sentences = [edit.sentence() for edit in edits] or "none"
    named = seen.assign_attrs({"python": cell, "token": token, "edits": sentences})
    # This engine writes to memory: the answer goes to a browser, not to a disk
    return bytes(named.to_netcdf(engine="h5netcdf"))
