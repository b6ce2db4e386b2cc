"""A run: labeled results of an analysis, with their provenance, in one netCDF file.

A run is an `xarray.DataTree` with one node per measure; `run.nc` holds it with one group per
measure, opened by `xarray.open_datatree("run.nc")` too. Every variable has `long_name` and `units`;
nodes with an axis `layer` have the coordinate `scheme (layer)`; attributes of the root state the
checkpoint and its digest, layout, dtype, prompts and their digest, and versions; those of groups
state the parameters of measures. No clock time is stored: the same input gives the same bytes.

This module knows nothing about models or measures.
"""

from __future__ import annotations

import os
import platform
import re
import warnings
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from repo_interp.errors import InputError, one_line, quoted
from repo_interp.positions.layouts import LEARNED
from repo_interp.storage.files import file_to_write, path_of, replace_whole, sealed, unsealed
from repo_interp.values import shortened

BLOCK_SIZE = "block_size"
"""The variable of a group that sets the unit of its axes of blocks: if it differs, equal labels
have different meanings.
"""
_ENGINE = "h5netcdf"
_ESCAPED = "escaped"
"""Attribute of a variable with escaped texts."""
_VERSIONED = ("numpy", "torch", "transformer-lens", "transformers", "xarray", "repo-interp")


DESCRIBED = ("checkpoint", "layout", "checkpoint_digest", "prompts_digest", "dtype")
"""Attributes of a run that a comparison has as variables, along its axis `run`."""
KEPT = ("run", *DESCRIBED, "training_step")
"""Names that a comparison needs, so that no group may have them."""


MOST_LINES = 20
"""Lines of a printed run."""


class Run(xr.DataTree):
    """A tree of groups that prints as a list of them; a group prints as xarray prints it."""

    __slots__ = ()

    def __str__(self) -> str:
        if self.parent is not None or not self.children:
            return super().__str__()
        about = f"Run of {self.attrs.get('checkpoint', 'a model')}"
        if "prompts" in self.attrs:
            count = self.attrs["prompts"]
            about += f": {count} prompt{'s' * (count != 1)} from {self.attrs.get('prompts_from')}"
        width = max(map(len, self.children))
        lines = [
            shortened(f"  {name:{width}}  {', '.join(map(str, node.data_vars))}", 100)
            for name, node in self.children.items()
        ]
        if (left := len(lines) - MOST_LINES + 3) > 1:
            lines = [*lines[: MOST_LINES - 3], f"  and {left} more groups"]
        example = next(iter(self.children))
        how = f'run["{example}"] is a group; ri.findings(run) says what stands out'
        return "\n".join([one_line(about, 200), *lines, how])

    __repr__ = __str__


def make_run(groups: Mapping[str, xr.Dataset], provenance: Mapping[str, Any]) -> xr.DataTree:
    """Make a run of groups.

    Args:
        groups: Datasets by name.
        provenance: Attributes of the run.

    Returns:
        The run, with plain attributes.

    Raises:
        ValueError: A variable lacks `long_name` or `units`.
    """
    for name, group in groups.items():
        for variable in group.data_vars:
            # ValueError and not InputError, because it is a bug in a measure
            if not {"long_name", "units"} <= group.variables[variable].attrs.keys():
                raise ValueError(f"{name}/{variable} lacks long_name or units")
    # As after a file, so that a run in memory and the same run read again are equal.
    run = Run(_with_plain_attributes(xr.Dataset(attrs=provenance)))
    # `from_dict` would copy every group three times
    run.children = {name: Run(_with_plain_attributes(group)) for name, group in groups.items()}
    return run


def checked_group(given: Any, source: str) -> xr.Dataset:
    """Require that a Dataset can be a group of a run.

    Args:
        given: Result of a measure or experiment.
        source: The measure or experiment, for messages.

    Returns:
        `given`.

    Raises:
        InputError: It is no Dataset, or a file cannot explain or hold it.
    """
    if not isinstance(given, xr.Dataset):
        raise InputError(f"{source} gives {type(given).__name__}; wanted an xarray.Dataset")
    # Axes without labels have names as well, and are no variables.
    for variable in {**given.variables, **given.sizes}:
        if (
            # `scheme` is ours and belongs to the axis `layer`; as anything else it is refused.
            variable != "scheme"
            or variable not in given.coords
            or given[variable].dims != ("layer",)
        ):
            require_name(variable, f"a variable of {source}", ("scheme", "run"))
    for variable in given.data_vars:
        array = given.variables[variable]
        if "long_name" not in array.attrs or "units" not in array.attrs:
            raise InputError(
                f"{source} gives {variable!r} without long_name or units; describe it, as "
                "measures.labels.with_attrs does"
            )
        # Object arrays are how xarray has texts; other objects no file holds.
        if array.dtype.kind == "O" and not all(
            isinstance(value, str) for value in array.values.flat
        ):
            raise InputError(
                f"{source} gives {variable!r} of Python objects; wanted numbers or texts"
            )
    # Layers without attention are left out, so the place on the axis is not the layer.
    if "layer" in given.dims and "layer" not in given.indexes:
        raise InputError(
            f"{source} gives the axis 'layer' without the numbers of the layers; keep those "
            "that were observed"
        )
    return given


def require_name(name: Any, owner: str, reserved: Collection[str]) -> None:
    """Refuse a name that no file holds, or that is reserved.

    Args:
        name: Name of a group or a variable.
        owner: The thing that has the name, for the message.
        reserved: Names that mean something else.

    Raises:
        InputError: The name cannot be used.
    """
    if not isinstance(name, str) or not name.strip(".") or "/" in name or name in reserved:
        raise InputError(
            f"{owner} has the name {name!r:.80}, which a run keeps for something else or "
            "cannot hold; name it otherwise"
        )


def with_schemes(
    group: xr.Dataset,
    schemes: Sequence[str],
    learned: Collection[str] = (),
    attributes: Mapping[str, Any] | None = None,
) -> xr.Dataset:
    """Add the coordinate `scheme (layer)` to a group.

    The attribute `learned` names schemes of other packages that learn positions; for our schemes
    the name shows it.

    Args:
        group: Dataset; one without the axis `layer` gets no coordinate.
        schemes: Scheme by layer.
        learned: Schemes that learn positions.
        attributes: Additional attributes of the group; None: no additional ones.

    Returns:
        The group.
    """
    if "layer" not in group.dims:
        return group.assign_attrs(attributes or {})
    names = [schemes[int(layer)] for layer in group.variables["layer"].values]
    foreign = ",".join(sorted({*learned} & {*names} - {*LEARNED}))
    scheme = xr.Variable("layer", names, {"learned": foreign} if foreign else {})
    # assign_coords would align all labels again, in twice the time
    coordinates = {name: group.variables[name] for name in group.coords} | {"scheme": scheme}
    return xr.Dataset(
        {name: group.variables[name] for name in group.data_vars},
        xr.Coordinates(coordinates, group.xindexes),
        {**group.attrs, **(attributes or {})},
    )


@cache
def versions() -> dict[str, str]:
    """Return the versions of the libraries that compute a run.

    Returns:
        Attributes by name.
    """
    return {"python": platform.python_version()} | {
        name.replace("-", "_"): version(name) for name in _VERSIONED
    }


def write_run(run: xr.DataTree, path: str | os.PathLike[str]) -> None:
    """Write a run as netCDF, whole or not at all.

    Args:
        run: The run.
        path: The file.

    Raises:
        InputError: `run` is not a run, an attribute cannot be stored, or the path cannot be
            written.
        OSError: The disk refuses.
    """
    require_run(run)
    place = file_to_write(path, "run.nc")
    # HDF5 ends a text at its first NUL, and tokens may have some.
    storable = _map_nodes(run, _escaped)
    encoding = {
        f"{node.path}": {name: _encoding(array) for name, array in node.data_vars.items()}
        for node in storable.subtree
        if node.data_vars
    }
    try:
        write_netcdf(storable, place, encoding)
    except OSError:
        raise
    except Exception:
        # Only after a failure, since trying every attribute alone takes time
        _require_attributes(storable)
        raise


def _require_attributes(run: xr.DataTree) -> None:
    """Raise InputError for the first attribute that no file can hold."""
    for node in run.subtree:
        owners = {
            node.path: node.dataset,
            **{f"{node.path}/{name}": array for name, array in node.dataset.variables.items()},
        }
        for place, owner in owners.items():
            for name, value in owner.attrs.items():
                try:
                    # Tried one by one, as the rules of h5netcdf for attributes are listed nowhere
                    xr.Dataset(attrs={name: value}).to_netcdf(engine=_ENGINE)
                except Exception:  # of xarray, h5netcdf, h5py or numpy
                    raise InputError(
                        f"the attribute {name!r} of {place} is {quoted(value)}, "
                        "which no netCDF file holds; wanted a text, "
                        "a number, or a list of either"
                    ) from None


def write_netcdf(
    data: xr.Dataset | xr.DataTree, path: Path, encoding: Mapping[str, Any] | None = None
) -> None:
    """Write data as netCDF, whole or not at all.

    The file is made in memory: after a write to the disk that fails, HDF5 ends the interpreter with
    a segmentation fault. Its last line, which HDF5 ignores, is the SHA-256 of the rest.

    Args:
        data: Dataset or tree.
        path: The file.
        encoding: Encoding by group, as xarray takes it.
    """
    # In memory first: HDF5 writes in place, and a full disk would leave half a file.
    image = data.to_netcdf(engine=_ENGINE, encoding=encoding)
    with replace_whole(path) as unfinished:
        unfinished.write_bytes(sealed(image))


def read_netcdf(file: Path) -> xr.DataTree:
    """Read a file that `write_netcdf` wrote, into memory.

    Args:
        file: The file.

    Returns:
        The tree.

    Raises:
        InputError: It is damaged, or holds more than numbers and texts.
    """
    try:
        content = file.read_bytes()
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}") from None
    # Checked before HDF5 reads it: messages of HDF5 about damaged bytes are uninformative
    return netcdf_of(unsealed(content, file), file)


def netcdf_of(content: bytes, file: Path) -> xr.DataTree:
    """Read the content of a netCDF file into memory.

    Args:
        content: Its bytes.
        file: The file, for messages.

    Returns:
        The tree.

    Raises:
        InputError: It is damaged (HDF5 may hang or crash on wrong bytes), or it contains more than
            numbers and texts.
    """
    # Imported here: h5py takes 11 MB, and an analysis in memory needs no file
    from repo_interp.storage.plain_hdf5 import ReadOnly, require_plain

    try:
        require_plain(content)
        with warnings.catch_warnings():
            # For files of other programs xarray warns, and continues with a guess
            warnings.simplefilter("error", UserWarning)
            warnings.simplefilter("error", RuntimeWarning)
            # Loaded, so that the file may be replaced while the run is in use; node by node, since
            # `DataTree.load` drops a variable with the name of its group
            with (
                ReadOnly(content) as hdf5,
                # h5netcdf takes an open file, which the types of xarray leave out
                xr.open_datatree(hdf5, engine=_ENGINE) as stored,  # pyright: ignore[reportArgumentType]
            ):
                return xr.DataTree.from_dict(
                    {node.path: node.to_dataset(inherit=False).load() for node in stored.subtree}
                )
    except Exception as error:
        # With a broken file HDF5 and its readers may raise any error
        raise InputError(f"{file} is not a run file: {one_line(error, 200)}") from None


def read_run(path: str | os.PathLike[str]) -> xr.DataTree:
    """Read a run into memory.

    Args:
        path: A run file, or the directory that has one as run.nc.

    Returns:
        The run.

    Raises:
        InputError: There is no run at the path, or its file is damaged.
    """
    path = path_of(path, "a run.nc or its directory")
    file = path / "run.nc" if path.is_dir() else path
    if not file.is_file():
        raise InputError(
            f"there is no run at {path}; wanted a run.nc, or the directory that `repo-interp "
            "analyze --out` wrote"
        )
    return _map_nodes(read_netcdf(file), lambda node: _with_plain_attributes(_unescaped(node)))


def require_run(run: object) -> None:
    """Refuse an object that is not a run.

    Args:
        run: Argument of a user.

    Raises:
        InputError: It is no `xarray.DataTree`.
    """
    if not isinstance(run, xr.DataTree):
        raise InputError(f"a run is what ri.analyze returns, an xarray.DataTree; got {quoted(run)}")


def _map_nodes(run: xr.DataTree, change: Callable[[xr.Dataset], xr.Dataset]) -> xr.DataTree:
    """Run with every node changed; datasets of `run` stay as they are."""
    # Inherited coordinates would be written again into every group.
    return Run.from_dict(
        {node.path: change(node.to_dataset(inherit=False)) for node in run.subtree}, name=run.name
    )


def _with_plain_attributes(node: xr.Dataset) -> xr.Dataset:
    """Node with attributes as they are after a file: numbers, texts and lists of Python."""
    owners = (node, *node.variables.values())
    if all(_plain_attribute(value) is value for owner in owners for value in owner.attrs.values()):
        return node
    # A shallow copy: arrays stay shared, and attributes are replaced, not changed.
    node = node.copy()
    for owner in (node, *node.variables.values()):
        owner.attrs = {name: _plain_attribute(value) for name, value in owner.attrs.items()}
    return node


def _plain_attribute(value: Any) -> Any:
    if isinstance(value, list | tuple) and len(value) == 1:
        # netCDF has no difference between a number and a list of one
        return _plain_attribute(value[0])
    if isinstance(value, np.ndarray | np.generic):
        return value.item() if value.size == 1 else value.tolist()
    return list(value) if isinstance(value, tuple) else value


def _escaped(node: xr.Dataset) -> xr.Dataset:
    """Escape texts of a node for HDF5, which ends texts at the first NUL."""
    for name, variable in node.variables.items():
        if variable.dtype.kind in "OU" and any("\0" in str(text) for text in variable.values.flat):
            # Backslashes are doubled first, so that the reverse is unique.
            node = _with_texts(
                node, name, lambda text: text.replace("\\", r"\\").replace("\0", r"\0")
            ).copy()
            node[name].attrs[_ESCAPED] = "backslash 0 is NUL, two backslashes are one"
    return node


def _unescaped(node: xr.Dataset) -> xr.Dataset:
    for name, variable in node.variables.items():
        if _ESCAPED in variable.attrs:
            node = _with_texts(
                node,
                name,
                lambda text: re.sub(r"\\([\\0])", lambda found: found[1].replace("0", "\0"), text),
            )
            del node[name].attrs[_ESCAPED]
    return node


def _with_texts(node: xr.Dataset, name: Hashable, change: Callable[[str], str]) -> xr.Dataset:
    """Return `node` with changed texts in one variable."""
    variable = node.variables[name]
    texts = np.array([change(str(text)) for text in variable.values.flat], dtype=object).reshape(
        variable.shape
    )
    changed = {name: (variable.dims, texts, dict(variable.attrs))}
    # assign would make a variable of a coordinate.
    return node.assign_coords(changed) if name in node.coords else node.assign(changed)


def _encoding(array: xr.DataArray) -> dict[str, Any]:
    # Small arrays gain nothing, and every packed array costs chunks and filters.
    if array.dtype.kind in "OUS" or array.size < 1024:
        return {}
    # shuffle puts equal bytes of numbers side by side, which zlib packs well.
    filled = {"_FillValue": np.nan} if array.dtype.kind == "f" else {}
    return {"zlib": True, "complevel": 4, "shuffle": True} | filled
