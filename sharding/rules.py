"""Sharding rules: the mesh axes that each logical axis of an array is split over.

Models use logical axes alone ("heads", "embed"); only these rules name mesh axes.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from sharding.folding import Folding
from sharding.mesh import AXES, ShardingError, divisors

LogicalAxes = tuple[str | None, ...]

FEATURES = "features"
"""Mesh axis of 2D tensor parallelism: weights that are split over it are multiplied there, and not all-gathered."""


def mesh_axes_of(parts: Iterable[Any]) -> frozenset[str]:
    """Mesh axes of (a part of) a partition spec."""
    return frozenset(axis for part in parts for axis in _names(part))


def without_axes(spec: PartitionSpec, axes: frozenset[str]) -> PartitionSpec:
    """Partition spec without some mesh axes."""
    return PartitionSpec(*(tuple(a for a in _names(part) if a not in axes) or None for part in spec))


def _names(part: Any) -> tuple[str, ...]:
    """Mesh axes of one dimension of a partition spec."""
    return () if part is None else part if isinstance(part, tuple) else (part,)


def split_sizes(mesh: Mesh | AbstractMesh) -> dict[str, int]:
    """Sizes of the mesh axes that arrays can be split over: all that are not manual (inside ``jax.shard_map``)."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name: mesh.shape[name] for name, kind in kinds if kind != AxisType.Manual}


@dataclass(frozen=True)
class Rules:
    """Sharding rules: table from logical axes to mesh axes.

    Attributes:
        table: ``((logical axis, (mesh axis, ...)), ...)``. Mesh axes that the mesh lacks, or has with size 1, are
            ignored, so one table serves every mesh.
        storage: logical axes along which parameters are split in storage alone: a weight is all-gathered over their
            mesh axes before use, and its gradient reduce-scattered (FSDP; ZeRO, arXiv:1910.02054 section 5).
        replicable: logical axes that may be replicated when a mesh axis is a multiple of their size (fewer key-value
            heads than tensor shards).
        where_divisible: (logical axis, mesh axis) pairs: a dimension that the mesh axis does not divide is not split
            over it.
        rings: mesh axes over which all-gathers and reduce-scatters of a split sequence are overlapped with matmuls
            (``sharding.collective_matmul``); over others they are single collectives before and after the matmuls.
        two_level: sums of gradients over ``local`` and other axes are reduce-scattered over ``local``, summed over the
            others, and all-gathered over ``local`` (``sharding.partial_sums``); False: one all-reduce over all.
        between_steps: mesh axes, the innermost first, over which parameters are split between steps alone (3-level
            ZeRO): a step begins with their all-gather over these (``sharding.gather_for_step``).
        int8_gather: weights of matmuls are all-gathered in 8 bits (``sharding.int8_gather``).
        star_bytes: most bytes of a result of a matmul whose partial sums over one mesh axis are added through one
            device (``sharding.star_sum``), for programs that are not differentiated; larger ones are the compiler's
            all-reduces. 0: all are.
        keep_heads: heads stay a dimension of a weight that one device multiplies with. For serving: as a matrix, a TPU
            would copy a weight in every step, whose tiles hold several heads if they are its outputs, and out of the
            stack of layers if they are its inputs. Not for training: XLA:CPU copies activations for the gradient then.
        folding: factoring of the mesh's devices for experts, in place of the table's; see ``on``.
        layouts: those of the layers in order, each with its number of layers, None for all that are left
            (``sharding.layer_layouts``); empty: all layers have the table's.
    """

    table: tuple[tuple[str, tuple[str, ...]], ...]
    storage: tuple[str, ...] = ("embed", "vocab_embed", "expert_embed", "latent")
    replicable: tuple[str, ...] = ("kv_heads", "act_kv_heads", "attn_kv_heads")
    where_divisible: tuple[tuple[str, str], ...] = (("act_kv_heads", FEATURES),)
    rings: tuple[str, ...] = ()
    two_level: bool = True
    between_steps: tuple[str, ...] = ()
    int8_gather: bool = False
    star_bytes: int = 0
    keep_heads: bool = False
    folding: Folding | None = None
    layouts: tuple[tuple[str, int | None], ...] = ()

    def __post_init__(self) -> None:
        # A mesh axis that no mesh can have would be ignored everywhere: silently replicated.
        for name, axes in self.table:
            for axis in axes:
                if axis not in AXES:
                    raise ShardingError(f"{name}: unknown mesh axis {axis!r}; the axes are {', '.join(AXES)}.")
        for name in self.storage:
            self.mesh_axes(name)

    def mesh_axes(self, logical: str) -> tuple[str, ...]:
        """Mesh axes that one logical axis is split over.

        Raises:
            ShardingError: the table has no such axis; names the closest.
        """
        for name, axes in self.table:
            if name == logical:
                return axes
        known = [name for name, _ in self.table]
        close = difflib.get_close_matches(logical, known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ShardingError(f"no sharding rule for the logical axis {logical!r}.{hint} There are: {', '.join(known)}.")

    def on(self, mesh: Mesh | AbstractMesh) -> Rules:
        """Rules for a mesh: with ``folding`` resolved, whose mesh axes depend on the mesh's sizes.

        Raises:
            ShardingError: the mesh does not factor so; names what does.
        """
        return self if self.folding is None else replace(self.override(**self.folding.table(mesh.shape)), folding=None)

    def override(self, **axes: tuple[str, ...]) -> Rules:
        """Rules with other mesh axes for some logical axes."""
        for name in axes:
            self.mesh_axes(name)
        return replace(self, table=tuple((name, axes.get(name, old)) for name, old in self.table))

    def spec(
        self,
        logical: Sequence[str | None],
        mesh: Mesh | AbstractMesh,
        shape: Sequence[int] | None = None,
        *,
        gathered: bool = False,
        what: str = "array",
    ) -> PartitionSpec:
        """Partition spec of an array with these logical axes on this mesh.

        Args:
            logical: one logical axis (or None) per dimension.
            shape: shape of the array, to check divisibility.
            gathered: leave out the axes of ``storage``, except ``features``: the spec of an all-gathered weight.
            what: name of the array, for messages.

        Raises:
            ShardingError: two dimensions map to one mesh axis, or a dimension is not divisible.
        """
        if shape is not None and len(shape) != len(logical):
            raise ShardingError(f"{what} has shape {tuple(shape)} but {len(logical)} logical axes {tuple(logical)}.")
        if self.folding is not None:
            return self.on(mesh).spec(logical, mesh, shape, gathered=gathered, what=what)
        sizes = split_sizes(mesh)
        used: dict[str, str] = {}
        parts: list[str | tuple[str, ...] | None] = []
        for dim, name in enumerate(logical):
            axes = () if name is None else self.mesh_axes(name)
            whole = gathered and name in self.storage
            axes = tuple(a for a in axes if sizes.get(a, 1) > 1 and not (whole and a != FEATURES))
            if shape is not None and axes:
                axes = self._fit(name or "", axes, shape[dim], mesh, what)
            for a in axes:
                if a in used:
                    raise ShardingError(
                        f"{what}: the logical axes {used[a]!r} and {name!r} both map to the mesh axis {a!r}, but an "
                        "array can be split over a mesh axis only once. Change the rule of one of them."
                    )
                used[a] = name or ""
            parts.append(None if not axes else axes[0] if len(axes) == 1 else axes)
        return PartitionSpec(*parts)

    def _fit(
        self, name: str, axes: tuple[str, ...], size: int, mesh: Mesh | AbstractMesh, what: str
    ) -> tuple[str, ...]:
        """``axes`` if ``size`` is divisible by them, nothing if the axis may be replicated, else an error."""
        ways = math.prod(mesh.shape[a] for a in axes)
        if size % ways == 0:
            return axes
        fewer = tuple(a for a in axes if (name, a) not in self.where_divisible)
        if fewer != axes:
            return self._fit(name, fewer, size, mesh, what)
        if name in self.replicable and ways % size == 0:
            return ()
        legal = divisors(size)
        nearest = sorted(sorted(legal, key=lambda d: abs(d - ways))[:3])
        product = " x ".join(f"{a}={mesh.shape[a]}" for a in axes)
        also = f", or a multiple of {size} (then {name} are replicated)" if name in self.replicable else ""
        raise ShardingError(
            f"{what}: {name} = {size} cannot be split {ways} ways ({product}). "
            f"Choose a size for {' x '.join(axes)} that divides {size}: the nearest are {nearest}{also}."
        )

    def sharding(
        self, logical: Sequence[str | None], mesh: Mesh | AbstractMesh, shape: Sequence[int], what: str
    ) -> NamedSharding:
        """Named sharding of an array: ``spec`` on a mesh."""
        return NamedSharding(mesh, self.spec(logical, mesh, shape, what=what))


DEFAULT = Rules(
    (
        # Activations.
        ("batch", ("replica", "data", "local", "fsdp", "expert")),
        ("seq", ("context", "ulysses")),
        ("residual_seq", ("context", "ulysses")),
        ("act_embed", ("features",)),
        ("act_heads", ("tensor", "features")),
        ("act_kv_heads", ("tensor", "features")),
        ("act_mlp", ("tensor", "features")),
        ("act_vocab", ("tensor", "features")),
        # Inside attention, where the all-to-all of Ulysses exchanges parts of the sequence for parts of the heads.
        ("attn_seq", ("context",)),
        ("attn_kv_seq", ("context",)),
        ("attn_heads", ("tensor", "features", "ulysses")),
        ("attn_kv_heads", ("tensor", "features", "ulysses")),
        # Pages of a paged KV cache: those of replicas.
        ("pages", ("replica", "data", "local", "fsdp", "expert")),
        # Parameters.
        ("layers", ()),
        ("vocab", ("tensor",)),
        ("embed", ("features", "fsdp", "expert", "context", "ulysses")),
        ("vocab_embed", ("features", "fsdp", "expert", "context", "ulysses")),
        ("heads", ("tensor",)),
        ("kv_heads", ("tensor",)),
        ("head_dim", ()),
        ("mlp", ("tensor",)),
        ("latent", ("fsdp", "expert", "context", "ulysses")),
        # Parameters of experts.
        ("experts", ("expert",)),
        ("expert_embed", ("fsdp", "context", "ulysses")),
        ("expert_mlp", ("tensor", "features")),
        # Tokens in a router and among experts: as elsewhere, but for a folding.
        ("router_seq", ("context", "ulysses")),
        ("expert_batch", ("replica", "data", "local", "fsdp", "expert")),
        ("expert_seq", ("context", "ulysses")),
    )
)
"""Default rules. Tensor parallelism (Megatron) splits heads, feed-forward width and vocabulary over ``tensor``;
context parallelism splits the sequence over ``context`` (ring attention) and ``ulysses`` (all-to-all); expert
parallelism splits experts over ``expert``. Parameters are stored split over ``fsdp`` (FSDP) and the other axes that
split tokens, because their gradients are summed there; only ``data`` and ``local`` have replicas (hybrid sharding:
``data`` between slices, ``fsdp`` inside). Options are in ``jaxllm.parallel.parallel_config``."""
