"""Restore: maps saved leaves to the leaves of a state and places them on devices.

Resharding on restore to any mesh; partial restore, other names, another dtype, layers stacked or unstacked.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from jaxllm.checkpoint.checkpoint_reader import CheckpointLeaf
from jaxllm.checkpoint.errors import CheckpointError, CheckpointMismatchError
from jaxllm.checkpoint.offloaded_leaf import OffloadedLeaf
from jaxllm.checkpoint.storage.checkpoint_manifest import LeafRecord
from jaxllm.checkpoint.storage.stored_leaf import Index

_SHOWN = 6  # mismatching leaves listed in full before "and N more"


@dataclasses.dataclass(frozen=True)
class LeafSource:
    """Source of a leaf, if that is not the saved leaf of the same path.

    Attributes:
        paths: paths of saved leaves: one, or several to be stacked.
        row: row of the saved leaf's first dimension; None takes the whole leaf.
        stack: whether the saved leaves are stacked along a new first dimension, one row for each.
    """

    paths: tuple[str, ...]
    row: int | None = None
    stack: bool = False

    def shape(self, saved: Mapping[str, Any]) -> tuple[int, ...]:
        """Shape of the leaf, from the shapes of the saved leaves."""
        inner = tuple(saved[self.paths[0]].shape)
        if self.row is not None:
            return inner[1:]
        return (len(self.paths), *inner) if self.stack else inner

    def read(self, saved: Mapping[str, CheckpointLeaf], index: Index | None = None) -> np.ndarray:
        """Reads a slice of the leaf's values; reads no more of the saved leaves than the slice needs."""
        if self.row is not None:
            inner = index or tuple(slice(None) for _ in saved[self.paths[0]].shape[1:])
            return saved[self.paths[0]].read((slice(self.row, self.row + 1), *inner))[0]
        if not self.stack:
            return saved[self.paths[0]].read(index)
        first, *rest = index or [slice(None)] * (1 + len(saved[self.paths[0]].shape))
        return np.stack([saved[path].read(tuple(rest)) for path in self.paths[first]])


@dataclasses.dataclass(frozen=True)
class RestoreOptions:
    """Restore options: how the leaves of a state are found in a checkpoint.

    Attributes:
        sources: path in the state -> source; other leaves have the same path in the checkpoint.
        cast: whether values are converted to the requested dtype; otherwise a different dtype is an error.
        partial: whether leaves of the checkpoint may be left out, and leaves that it lacks are taken unchanged from
            the given state.
    """

    sources: Mapping[str, LeafSource] = dataclasses.field(default_factory=dict)
    cast: bool = False
    partial: bool = False

    def source(self, path: str) -> LeafSource:
        """Source of the leaf at `path` of the state."""
        return self.sources.get(path, LeafSource((path,)))


EXACT = RestoreOptions()


def unstack_sources(stacks: Mapping[str, LeafRecord], name: Callable[[str, int], str]) -> dict[str, LeafSource]:
    """Sources of single layers' leaves, from leaves that stack all layers of a group, one per row.

    Args:
        stacks: path -> record of the stacked leaves.
        name: (path, row) -> path of the leaf of that row.
    """
    return {name(path, row): LeafSource((path,), row) for path, leaf in stacks.items() for row in range(leaf.shape[0])}


def stack_sources(
    saved: Mapping[str, LeafRecord], place: Callable[[str], tuple[str, int] | None]
) -> dict[str, LeafSource]:
    """Sources of leaves that stack all layers of a group, from the leaves of single layers.

    Args:
        place: path -> (path of the stack, row in it); None for a leaf that is in no stack.

    Raises:
        CheckpointMismatchError: a row of a stack is missing.
    """
    rows: dict[str, dict[int, str]] = {}
    for path in saved:
        if (found := place(path)) is not None:
            rows.setdefault(found[0], {})[found[1]] = path
    for path, have in rows.items():
        if sorted(have) != list(range(len(have))):
            raise CheckpointMismatchError(f"{path} cannot be stacked: of its layers only {sorted(have)} are saved.")
    return {path: LeafSource(tuple(have[row] for row in range(len(have))), stack=True) for path, have in rows.items()}


def check_match(
    wanted: Mapping[str, Any], saved: Mapping[str, LeafRecord], where: str, reading: RestoreOptions = EXACT
) -> None:
    """Compares the requested leaves with the saved ones.

    Args:
        wanted: path -> anything with `shape` and `dtype`.
        saved: path -> the manifest's record.
        where: name of the checkpoint, for the message.

    Raises:
        CheckpointMismatchError: naming the leaves, with the closest names, shapes and dtypes.
    """
    needs = {path: reading.source(path).paths for path in wanted}
    used = {path for paths in needs.values() for path in paths}
    missing = [p for p, paths in needs.items() if not set(paths) <= saved.keys()]
    extra = [p for p in saved if p not in used]
    lines = []
    if not reading.partial:
        for path in missing:
            # A saved leaf without a match is a likelier meaning than one that is already matched.
            close = difflib.get_close_matches(path, extra, n=1) or difflib.get_close_matches(path, saved, n=1)
            lines.append(f"{path}: not in the checkpoint" + (f" (closest: {close[0]})" if close else ""))
        for path in extra:
            close = difflib.get_close_matches(path, missing, n=1)
            lines.append(f"{path}: in the checkpoint, not in the state" + (f" (closest: {close[0]})" if close else ""))
    for path, leaf in wanted.items():
        if path in missing:
            continue
        record = saved[needs[path][0]]
        shape = reading.source(path).shape(saved)
        if tuple(leaf.shape) != shape:
            lines.append(f"{path}: shape {tuple(leaf.shape)} requested, {shape} saved")
        if str(leaf.dtype) != record.dtype and not (reading.cast and record.key_impl is None):
            lines.append(f"{path}: dtype {leaf.dtype} requested, {record.dtype} saved")
    if not lines:
        return
    shown = "\n".join(f"  {line}" for line in lines[:_SHOWN])
    more = f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    raise CheckpointMismatchError(
        f"{where} does not have the requested state:\n{shown}{more}\n"
        "Build the state from the config that was saved with it (read_meta), or name another checkpoint."
    )


def require_arrays(leaves: Mapping[str, Any]) -> None:
    """Raises a CheckpointError for a restore target without shape and dtype."""
    for path, leaf in leaves.items():
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise CheckpointError(
                f"restore target {path} is a {type(leaf).__name__}: give jax.ShapeDtypeStruct(shape, dtype, "
                "sharding=...), an array of that shape, or np.ndarray for host memory."
            )


def place_leaf(path: str, source: LeafSource, saved: Mapping[str, CheckpointLeaf], target: Any) -> Any:
    """Reads a leaf and places it on devices; reads no more of each file than this process's devices need.

    Args:
        path: path of the leaf, for messages.
        source: the saved leaves that it is made from.
        saved: path -> saved leaf.
        target: a jax array or ShapeDtypeStruct (its sharding applies; without one, the default device), or a numpy
            array (the result is a numpy array too), or a leaf that is not in memory.

    Raises:
        CheckpointError: a sharding without devices, or a 64-bit leaf while x64 is off.
    """
    record = saved[source.paths[0]].record
    if isinstance(target, np.ndarray | np.generic):
        array = source.read(saved)
        return array if record.key_impl or array.dtype == target.dtype else array.astype(target.dtype)
    if isinstance(target, OffloadedLeaf):
        return target.restore(lambda index: source.read(saved, index).astype(target.dtype, copy=False))
    sharding = getattr(target, "sharding", None)
    if isinstance(getattr(sharding, "mesh", None), AbstractMesh):
        raise CheckpointError(
            f"leaf {path} cannot be restored onto an abstract mesh, which has no devices: "
            "give the ShapeDtypeStruct a NamedSharding of a concrete mesh."
        )
    if record.key_impl is not None:
        keys = jax.random.wrap_key_data(jnp.asarray(source.read(saved)), impl=record.key_impl)
        if sharding is None or sharding.is_fully_addressable:
            return jax.device_put(keys, sharding)
        return jax.jit(lambda key: key, out_shardings=sharding)(keys)
    dtype = np.dtype(target.dtype)
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise CheckpointError(
            f'leaf {path} is {dtype}, which JAX would truncate to 32 bits: jax.config.update("jax_enable_x64", True).'
        )

    slices: dict[str, np.ndarray] = {}

    def piece(index: Index | None) -> np.ndarray:
        if str(index) not in slices:  # devices with the same slice share one read
            slices[str(index)] = source.read(saved, index).astype(dtype, copy=False)
        return slices[str(index)]

    if sharding is None:
        return jax.device_put(piece(None))
    return jax.make_array_from_callback(tuple(target.shape), sharding, piece)
