"""Which saved leaf becomes which leaf of a state, and its way onto devices: any layout, partly, renamed, in another
dtype, stacked or not."""

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
from jaxllm.checkpoint.storage.checkpoint_manifest import LeafRecord
from jaxllm.checkpoint.storage.stored_leaf import Index

_SHOWN = 6  # mismatching leaves listed in full before "and N more"


@dataclasses.dataclass(frozen=True)
class LeafSource:
    """Where a leaf comes from, if not from the saved one of its own path.

    Attributes:
        paths: saved leaves: one, or those to be stacked.
        row: of the first dimension of the one; None takes all of it.
        stack: whether they get a new first dimension, with a row for each.
    """

    paths: tuple[str, ...]
    row: int | None = None
    stack: bool = False

    def shape(self, saved: Mapping[str, Any]) -> tuple[int, ...]:
        """The leaf's shape, from those of the saved ones."""
        inner = tuple(saved[self.paths[0]].shape)
        if self.row is not None:
            return inner[1:]
        return (len(self.paths), *inner) if self.stack else inner

    def read(self, saved: Mapping[str, CheckpointLeaf], index: Index | None = None) -> np.ndarray:
        """A slice of the leaf's values; of the saved ones no more is read than it takes."""
        if self.row is not None:
            inner = index or tuple(slice(None) for _ in saved[self.paths[0]].shape[1:])
            return saved[self.paths[0]].read((slice(self.row, self.row + 1), *inner))[0]
        if not self.stack:
            return saved[self.paths[0]].read(index)
        first, *rest = index or [slice(None)] * (1 + len(saved[self.paths[0]].shape))
        return np.stack([saved[path].read(tuple(rest)) for path in self.paths[first]])


@dataclasses.dataclass(frozen=True)
class RestoreOptions:
    """How the leaves of a state are found in a checkpoint.

    Attributes:
        sources: where leaves come from, by their paths in the state; others have the same path on disk.
        cast: whether numbers take the dtype that is asked for; otherwise another dtype is refused.
        partial: whether leaves of the checkpoint may be left out, and leaves that it lacks are taken from the state
            that is given, as they are.
    """

    sources: Mapping[str, LeafSource] = dataclasses.field(default_factory=dict)
    cast: bool = False
    partial: bool = False

    def source(self, path: str) -> LeafSource:
        return self.sources.get(path, LeafSource((path,)))


EXACT = RestoreOptions()


def unstack_sources(stacks: Mapping[str, LeafRecord], name: Callable[[str, int], str]) -> dict[str, LeafSource]:
    """Leaves of single layers, from those that hold all layers of a group, one a row.

    Args:
        name: (path, row) -> the path of that row alone.
    """
    return {name(path, row): LeafSource((path,), row) for path, leaf in stacks.items() for row in range(leaf.shape[0])}


def stack_sources(
    saved: Mapping[str, LeafRecord], place: Callable[[str], tuple[str, int] | None]
) -> dict[str, LeafSource]:
    """Leaves that hold all layers of a group, from those of single layers.

    Args:
        place: path -> (path of the stack, row in it); None for one that is in no stack.
    """
    rows: dict[str, dict[int, str]] = {}
    for path in saved:
        if (found := place(path)) is not None:
            rows.setdefault(found[0], {})[found[1]] = path
    for path, have in rows.items():
        if sorted(have) != list(range(len(have))):
            raise CheckpointMismatchError(f"{path} is to be stacked from the layers {sorted(have)}: some are missing.")
    return {path: LeafSource(tuple(have[row] for row in range(len(have))), stack=True) for path, have in rows.items()}


def check_match(
    wanted: Mapping[str, Any], saved: Mapping[str, LeafRecord], where: str, reading: RestoreOptions = EXACT
) -> None:
    """Compares the leaves asked for with those saved.

    Args:
        wanted: path -> anything with `shape` and `dtype`.
        saved: path -> what the manifest says.
        where: the checkpoint's name, for the message.

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
            # A leaf left over on the other side is the likelier meaning than one that already has its match.
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
            lines.append(f"{path}: shape {tuple(leaf.shape)} asked for, {shape} saved")
        if str(leaf.dtype) != record.dtype and not (reading.cast and record.key_impl is None):
            lines.append(f"{path}: dtype {leaf.dtype} asked for, {record.dtype} saved")
    if not lines:
        return
    shown = "\n".join(f"  {line}" for line in lines[:_SHOWN])
    more = f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    raise CheckpointMismatchError(
        f"{where} does not hold the state asked for:\n{shown}{more}\n"
        "Build the state from the config that was saved with it (read_meta), or name another checkpoint."
    )


def require_arrays(leaves: Mapping[str, Any]) -> None:
    """Raises a CheckpointError for a restore target that has no shape and dtype."""
    for path, leaf in leaves.items():
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise CheckpointError(
                f"restore target {path} is a {type(leaf).__name__}: give jax.ShapeDtypeStruct(shape, dtype, "
                "sharding=...), an array of that shape, or np.ndarray for host memory."
            )


def place_leaf(path: str, source: LeafSource, saved: Mapping[str, CheckpointLeaf], target: Any) -> Any:
    """Puts a saved leaf where `target` says; of each of its files no more is read than this process's devices hold.

    Args:
        path: the leaf's name, for messages.
        target: a jax array or ShapeDtypeStruct (its sharding decides; none: the default device), or a numpy array
            (the result is one too).

    Raises:
        CheckpointError: a sharding without devices, or a 64-bit leaf while x64 is off.
    """
    record = saved[source.paths[0]].record
    if isinstance(target, np.ndarray | np.generic):
        array = source.read(saved)
        return array if record.key_impl or array.dtype == target.dtype else array.astype(target.dtype)
    sharding = getattr(target, "sharding", None)
    if isinstance(getattr(sharding, "mesh", None), AbstractMesh):
        raise CheckpointError(
            f"leaf {path} is to be restored onto an abstract mesh, which has no devices: "
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
            f'leaf {path} is {dtype}, which JAX would cut to 32 bits: jax.config.update("jax_enable_x64", True).'
        )

    slices: dict[str, np.ndarray] = {}

    def piece(index: Index | None) -> np.ndarray:
        if str(index) not in slices:  # devices that hold the same share what is read
            slices[str(index)] = source.read(saved, index).astype(dtype, copy=False)
        return slices[str(index)]

    if sharding is None:
        return jax.device_put(piece(None))
    return jax.make_array_from_callback(tuple(target.shape), sharding, piece)
