"""Sharding table of a training state: each array, its sharding, and its bytes per device. Nothing is allocated.

A sharding is written ``wq[L, D_fsdp, N_tensor, H]``: a letter for each dimension, followed by the mesh axes over which
it is split (``D_{data,fsdp}`` for several), or by nothing where each device has all of it (replicated).

Legend: L layers, D embed, N query heads, K kv heads, H head dim, C latent, F mlp, V vocab, E experts, P positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.tree_util import keystr, tree_leaves_with_path

from sharding import LogicalAxes

LETTERS = {
    "layers": "L",
    "embed": "D",
    "vocab_embed": "D",
    "heads": "N",
    "kv_heads": "K",
    "head_dim": "H",
    "mlp": "F",
    "latent": "C",
    "vocab": "V",
    "experts": "E",
    "expert_embed": "D",
    "expert_mlp": "F",
    "positions": "P",
}


@dataclass(frozen=True)
class ShardingRow:
    """Row of a sharding table: one array.

    Attributes:
        name: leaf path.
        shape: global shape.
        dtype: dtype.
        place: sharding, written as ``wq[L, D_fsdp, N_tensor, H]``.
        bytes: bytes of the global array.
        device_bytes: bytes of one device's shard.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    place: str
    bytes: int
    device_bytes: int


@dataclass(frozen=True)
class ExpectedCollective:
    """Collective that the formulas of a plan expect in one step, on one device.

    Attributes:
        kind: XLA's name, such as ``all-gather``.
        axes: mesh axes it runs over.
        count: number of executions per step.
        bytes: bytes of the full (gathered or summed) array of one execution.
        why: purpose.
    """

    kind: str
    axes: tuple[str, ...]
    count: int
    bytes: int
    why: str


@dataclass(frozen=True)
class ShardingTable:
    """Sharding table: the arrays of a training state, and the collectives of a step.

    Attributes:
        mesh: sizes of the mesh axes.
        parameters: a row for each parameter.
        optimizer: a row for each array of the optimizer state.
        collectives: expected collectives of one step; empty where there is no formula.
        remark: why there is no formula.
    """

    mesh: Mapping[str, int]
    parameters: tuple[ShardingRow, ...]
    optimizer: tuple[ShardingRow, ...]
    collectives: tuple[ExpectedCollective, ...] = ()
    remark: str = ""

    @property
    def parameter_count(self) -> int:
        """Number of parameters."""
        return sum(math.prod(row.shape) for row in self.parameters)

    def to_json(self) -> dict[str, Any]:
        """Table as JSON-able data."""
        return asdict(self) | {
            "devices": math.prod(self.mesh.values()),
            "parameter_device_bytes": device_bytes(self.parameters),
            "optimizer_device_bytes": device_bytes(self.optimizer),
        }


def state_sharding_table(
    params: Any,
    opt_state: Any,
    logical_axes: Any,
    mesh: Mapping[str, int],
) -> ShardingTable:
    """Sharding table of a training state.

    Args:
        params: pytree of ``jax.ShapeDtypeStruct`` with NamedShardings, on any kind of mesh.
        opt_state: the same of the optimizer state; an array whose path ends with a parameter's gets its letters.
        logical_axes: logical axes of ``params``, a tuple at each leaf.
        mesh: sizes of the mesh axes.
    """
    axes = {
        _name(path): leaf
        for path, leaf in tree_leaves_with_path(logical_axes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    }
    return ShardingTable(
        dict(mesh),
        tuple(_row(_name(path), leaf, axes[_name(path)]) for path, leaf in tree_leaves_with_path(params)),
        tuple(_row(_name(path), leaf, _axes_of(_name(path), leaf, axes)) for path, leaf in _arrays(opt_state)),
    )


def device_bytes(rows: Sequence[ShardingRow]) -> int:
    """Bytes of all rows per device."""
    return sum(row.device_bytes for row in rows)


def notation(name: str, spec: PartitionSpec, axes: LogicalAxes) -> str:
    """Sharding notation of an array, such as ``wq[L, D_fsdp, N_tensor, H]``.

    Args:
        name: name of the array.
        spec: mesh axes of each dimension.
        axes: logical axis of each dimension; one without a letter is written by its name, None as ``.``.
    """
    parts = []
    for number, logical in enumerate(axes):
        split = spec[number] if number < len(spec) else None
        names = () if split is None else (split,) if isinstance(split, str) else tuple(split)
        letter = "." if logical is None else LETTERS.get(logical, logical)
        over = "" if not names else f"_{names[0]}" if len(names) == 1 else f"_{{{','.join(names)}}}"
        parts.append(letter + over)
    return f"{name}[{', '.join(parts)}]"


def _row(name: str, leaf: Any, axes: LogicalAxes) -> ShardingRow:
    size = 4 if jnp.issubdtype(leaf.dtype, jax.dtypes.extended) else np.dtype(leaf.dtype).itemsize
    part = leaf.sharding.shard_shape(leaf.shape)
    return ShardingRow(
        name,
        tuple(leaf.shape),
        str(leaf.dtype),
        notation(name.rsplit("/", 1)[-1], leaf.sharding.spec, axes),
        size * math.prod(leaf.shape),
        size * math.prod(part),
    )


def _axes_of(name: str, leaf: Any, axes: Mapping[str, LogicalAxes]) -> LogicalAxes:
    """Logical axes of an array of the optimizer state: those of the parameter whose path its own ends with."""
    for parameter, found in axes.items():
        if name.endswith("/" + parameter) and len(found) == len(leaf.shape):
            return found
    return (None,) * len(leaf.shape)


def _arrays(tree: Any) -> list[tuple[Any, Any]]:
    return [(path, leaf) for path, leaf in tree_leaves_with_path(tree) if hasattr(leaf, "sharding")]


def _name(path: Any) -> str:
    return keystr(path, simple=True, separator="/")
