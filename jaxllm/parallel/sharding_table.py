"""The sharding table of a state: each array, how it is split, and its bytes on a device. Nothing is allocated.

An array's place is written ``wq[L, D_fsdp, N_tensor, H]``: a letter for each dimension, after it the mesh axes over
which that dimension is split (``D_{data,fsdp}`` where they are several), nothing where each device has it whole.

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
    """One array.

    Attributes:
        name: its path.
        shape: of the whole.
        dtype: its type.
        place: how it is split, ``wq[L, D_fsdp, N_tensor, H]``.
        bytes: of the whole.
        device_bytes: of one device's part.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    place: str
    bytes: int
    device_bytes: int


@dataclass(frozen=True)
class ExpectedCollective:
    """Collectives that a plan's formula expects of one step, on one device.

    Attributes:
        kind: by XLA's name, such as ``all-gather``.
        axes: mesh axes it goes over.
        count: how often.
        bytes: of one: the whole that it moves.
        why: what it is for.
    """

    kind: str
    axes: tuple[str, ...]
    count: int
    bytes: int
    why: str


@dataclass(frozen=True)
class ShardingTable:
    """What a step's state takes of each device.

    Attributes:
        mesh: sizes of its axes.
        parameters: a row for each.
        optimizer: a row for each array of the optimizer's state.
        collectives: of one step; empty where no formula was given.
        remark: why there is none.
    """

    mesh: Mapping[str, int]
    parameters: tuple[ShardingRow, ...]
    optimizer: tuple[ShardingRow, ...]
    collectives: tuple[ExpectedCollective, ...] = ()
    remark: str = ""

    @property
    def parameter_count(self) -> int:
        """Numbers in all parameters."""
        return sum(math.prod(row.shape) for row in self.parameters)

    def to_json(self) -> dict[str, Any]:
        """JSON-able data."""
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
    """The table of a state.

    Args:
        params: pytree of ``jax.ShapeDtypeStruct`` with NamedShardings, of any kind of mesh.
        opt_state: the same of the optimizer; an array of a parameter's path and shape is written with its letters.
        logical_axes: of ``params``, a tuple at each leaf.
        mesh: sizes of its axes.
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
    """Bytes of all rows on one device."""
    return sum(row.device_bytes for row in rows)


def notation(name: str, spec: PartitionSpec, axes: LogicalAxes) -> str:
    """``wq[L, D_fsdp, N_tensor, H]``.

    Args:
        name: of the array.
        spec: mesh axes of each dimension.
        axes: logical axes; dimensions without one, or with one that has no letter, are written by its name or as ``.``.
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
    """Logical axes of an optimizer's array: those of the parameter whose path its own ends with."""
    for parameter, found in axes.items():
        if name.endswith("/" + parameter) and len(found) == len(leaf.shape):
            return found
    return (None,) * len(leaf.shape)


def _arrays(tree: Any) -> list[tuple[Any, Any]]:
    return [(path, leaf) for path, leaf in tree_leaves_with_path(tree) if hasattr(leaf, "sharding")]


def _name(path: Any) -> str:
    return keystr(path, simple=True, separator="/")
