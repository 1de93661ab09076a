"""Pytrees as flat {path: leaf}: names of leaves, host copies, and the way back onto devices."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh

from jaxllm.checkpoint.errors import CheckpointError, CheckpointMismatchError
from jaxllm.checkpoint.manifest import LeafRecord

_SHOWN = 6  # mismatching leaves listed in full before "and N more"


@dataclasses.dataclass(frozen=True)
class HostLeaf:
    """One leaf copied to host memory. For typed PRNG keys `array` is the key data, with its trailing dims."""

    array: np.ndarray
    shape: tuple[int, ...]
    dtype: str
    key_impl: str | None


def leaf_paths(tree: Any) -> dict[str, Any]:
    """The leaves of any pytree by path, such as `opt_state/0/mu/blocks/wq`, in the tree's own order.

    A `/` or `%` inside a key is written `%2F`, `%25`.

    Raises:
        CheckpointError: two leaves have the same path (dict keys `1` and `"1"`).
    """
    leaves: dict[str, Any] = {}
    for entries, leaf in jax.tree_util.tree_leaves_with_path(tree):
        path = "/".join(_quote(_entry(e), "/%") for e in entries) or "value"
        if path in leaves:
            raise CheckpointError(f"two leaves of the state have the path {path}: rename a key.")
        leaves[path] = leaf
    return leaves


def storage_keys(path: str) -> tuple[str, ...]:
    """The nested dict keys under which a leaf is stored; a folder's name is these joined by dots."""
    escaped = (re.sub(r"[^A-Za-z0-9_%-]", lambda m: f"%{ord(m.group()):02X}", part) for part in path.split("/"))
    return tuple(part or "%" for part in escaped)


def nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """{"a/b": x} -> {"a": {"b": x}}, with the keys' own characters."""
    root: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, name = (_unquote(part) for part in path.split("/"))
        node = root
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return root


def snapshot(tree: Any) -> dict[str, HostLeaf]:
    """Copies every leaf to host memory; the caller may donate or overwrite its arrays afterwards.

    Args:
        tree: jax arrays of any dtype and sharding, typed PRNG keys and numpy arrays.

    Raises:
        CheckpointError: a leaf is no array, was donated, or lives partly in other processes.
    """
    leaves = leaf_paths(tree)
    shapes: dict[str, tuple[int, ...]] = {}
    shards: dict[str, list[tuple[Any, jax.Array]]] = {}
    impls: dict[str, str] = {}
    for path, leaf in leaves.items():
        if isinstance(leaf, np.ndarray | np.generic):
            if leaf.dtype.kind in "OSUMm":
                raise CheckpointError(f"leaf {path} has dtype {leaf.dtype}: a checkpoint holds numbers; use `meta`.")
            continue
        if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer):
            raise CheckpointError(
                f"leaf {path} is a {type(leaf).__name__}, and a checkpoint holds arrays. "
                "Make it one (jnp.asarray), or put it into `meta`, which holds JSON."
            )
        if leaf.is_deleted():
            raise CheckpointError(
                f"leaf {path} was donated to a jitted function: save the state that the step returned, not its input."
            )
        if not leaf.is_fully_addressable:
            raise CheckpointError(
                f"leaf {path} lives partly on devices of other processes. This Checkpointer saves from one process: "
                "open a SharedCheckpointer in each of them."
            )
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            impls[path] = str(jax.random.key_impl(leaf))
            leaf = jax.random.key_data(leaf)
        # Fresh per-shard arrays: their host values die with them, whereas np.asarray(leaf) stays cached in the leaf.
        shapes[path] = leaf.shape
        shards[path] = [(s.index, s.data) for s in leaf.addressable_shards if s.replica_id == 0 and s.data is not None]
        for _, data in shards[path]:
            data.copy_to_host_async()

    host: dict[str, HostLeaf] = {}
    for path, leaf in leaves.items():
        if path in shards:
            array = np.empty(shapes[path], np.uint32 if path in impls else leaf.dtype)
            for index, data in shards.pop(path):
                array[index] = np.asarray(data)
        else:
            array = np.array(leaf, dtype=leaf.dtype.newbyteorder("="), order="C")
        dtype = str(leaf.dtype if path in impls else array.dtype)
        host[path] = HostLeaf(array, tuple(leaf.shape), dtype, impls.get(path))
    return host


def check_match(wanted: Mapping[str, Any], saved: Mapping[str, LeafRecord], where: str) -> None:
    """Compares the leaves asked for with those saved.

    Args:
        wanted: path -> anything with `shape` and `dtype`.
        saved: path -> what the manifest says.
        where: the checkpoint's name, for the message.

    Raises:
        CheckpointMismatchError: naming the leaves, with the closest names, shapes and dtypes.
    """
    missing = [p for p in wanted if p not in saved]
    extra = [p for p in saved if p not in wanted]
    lines = []
    for path in missing:
        # A leaf left over on the other side is the likelier meaning than one that already has its match.
        close = difflib.get_close_matches(path, extra, n=1) or difflib.get_close_matches(path, saved, n=1)
        lines.append(f"{path}: not in the checkpoint" + (f" (closest: {close[0]})" if close else ""))
    for path in extra:
        close = difflib.get_close_matches(path, missing, n=1)
        lines.append(f"{path}: in the checkpoint, not in the state" + (f" (closest: {close[0]})" if close else ""))
    for path, leaf in wanted.items():
        if path not in saved:
            continue
        record = saved[path]
        if tuple(leaf.shape) != record.shape:
            lines.append(f"{path}: shape {tuple(leaf.shape)} asked for, {record.shape} saved")
        if str(leaf.dtype) != record.dtype:
            lines.append(f"{path}: dtype {leaf.dtype} asked for, {record.dtype} saved")
    if not lines:
        return
    shown = "\n".join(f"  {line}" for line in lines[:_SHOWN])
    more = f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    raise CheckpointMismatchError(
        f"{where} does not hold the state asked for:\n{shown}{more}\n"
        "Build the state from the config that was saved with it (read_meta), or name another checkpoint."
    )


def place(path: str, array: np.ndarray, record: LeafRecord, target: Any) -> Any:
    """Puts a leaf read from disk where `target` says.

    Args:
        path: the leaf's name, for messages.
        array: its values (key data for PRNG keys).
        record: its entry in the manifest.
        target: a jax array or ShapeDtypeStruct (its sharding decides; none: the default device), or a numpy array
            (the result is one too).

    Raises:
        CheckpointError: a sharding without devices, or a 64-bit leaf while x64 is off.
    """
    if isinstance(target, np.ndarray | np.generic):
        return array
    sharding = getattr(target, "sharding", None)
    if isinstance(getattr(sharding, "mesh", None), AbstractMesh):
        raise CheckpointError(
            f"leaf {path} is to be restored onto an abstract mesh, which has no devices: "
            "give the ShapeDtypeStruct a NamedSharding of a concrete mesh."
        )
    if record.key_impl is not None:
        keys = jax.random.wrap_key_data(jnp.asarray(array), impl=record.key_impl)
        if sharding is None or sharding.is_fully_addressable:
            return jax.device_put(keys, sharding)
        return jax.jit(lambda key: key, out_shardings=sharding)(keys)
    if jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
        raise CheckpointError(
            f'leaf {path} is {array.dtype}, which JAX would cut to 32 bits: jax.config.update("jax_enable_x64", True).'
        )
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    # device_put would compare the whole array with every other process's.
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def require_arrays(leaves: Mapping[str, Any]) -> None:
    """Raises a CheckpointError for a restore target that has no shape and dtype."""
    for path, leaf in leaves.items():
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise CheckpointError(
                f"restore target {path} is a {type(leaf).__name__}: give jax.ShapeDtypeStruct(shape, dtype, "
                "sharding=...), an array of that shape, or np.ndarray for host memory."
            )


def _entry(entry: Any) -> str:
    """One step of a path in a pytree, without JAX's brackets and quotes."""
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


def _quote(text: str, characters: Sequence[str]) -> str:
    return "".join(f"%{ord(c):02X}" if c in characters else c for c in text)


def _unquote(text: str) -> str:
    return re.sub(r"%(2F|25)", lambda m: chr(int(m.group(1), 16)), text)
