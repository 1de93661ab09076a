"""Collective traffic by formula: the collectives that a compiled training step of a plan must have, and no others.

All-gathers, reduce-scatters, all-reduces, all-to-alls and collective-permutes of FSDP, tensor parallelism, sequence
parallelism, context parallelism and expert parallelism; derived in docs/train/parallelism.md. Left out are scalars (the
loss, the norm of the gradients) and, where parameters are split, the few bytes that a compiler may add to them.

Legend: A bytes of a device's activations [B, S, D], L layers.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jaxllm.models import BlockConfig, Functional, MoeConfig
from jaxllm.models.functional import layouts_by_segment
from jaxllm.models.moe.expert_dispatch import room_of_expert
from jaxllm.models.moe.expert_exchange import receive_rows
from jaxllm.models.remat import policies_by_layer
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.parallel.sharding_table import ExpectedCollective
from sharding.int8_gather import block_of
from sharding.layer_layouts import AXIS, between, rules_of
from sharding.partial_sums import LOCAL, spec_of_parts
from sharding.rules import Rules, without_axes

TOKENS = ("batch", "seq")
ONCE = ("weights of a step", "gradients of a step")
"""Purposes of collectives of 3-level ZeRO that a step has once, whatever its micro-batches."""


def expected_collectives(
    model: Functional,
    mesh: Mesh | AbstractMesh,
    plan: ParallelConfig,
    *,
    rows: int,
    seq_len: int,
    accumulate: int = 1,
    proven: bool = True,
) -> tuple[ExpectedCollective, ...]:
    """Expected collectives of one training step on one device, the largest traffic first.

    Args:
        model: model with the sharding rules of the plan.
        rows, seq_len: shape of the global batch.
        accumulate: number of micro-batches (gradient accumulation).
        proven: raise an error for plans whose formulas were never compared with a compiled step; False gives estimates.

    Raises:
        NotImplementedError: there is no formula for the plan; says for which part.
    """
    if plan.context == "by_need":
        raise NotImplementedError(
            'collective traffic with context = "by_need": the documents of a batch decide on its micro-steps and rings.'
        )
    if plan.state_shares:
        raise NotImplementedError(
            "collective traffic with parallel.state_shares: new parameters are all-gathered unit by unit, in slices "
            "with room for the largest; there is no formula for a step of several programs yet."
        )
    if plan.micro_batches:
        raise NotImplementedError(
            "collective traffic with parallel.micro_batches: devices along data are in different micro-batches; there "
            "is no formula yet."
        )
    if model.rules.layouts and plan.zero != 3:
        raise NotImplementedError(
            f"collective traffic with layouts by layer and zero = {plan.zero}: formulas are those of zero = 3."
        )
    step = _Step(model, mesh, plan, rows // accumulate, seq_len, accumulate, proven)
    if proven:
        step.check()
    found: dict[tuple[str, tuple[str, ...], int, str], int] = {}
    for one in (*step.weights(), *step.activations(), *step.between_layouts()):
        if one.count and one.bytes and one.axes:
            key = (one.kind, one.axes, one.bytes, one.why)
            found[key] = found.get(key, 0) + one.count
    return tuple(
        ExpectedCollective(kind, axes, count, size, why)
        for (kind, axes, size, why), count in sorted(found.items(), key=lambda item: -item[0][2] * item[1])
    )


def group_collectives(
    model: Functional,
    mesh: Mesh | AbstractMesh,
    plan: ParallelConfig,
    segment: int,
    layout: str,
    policy: str,
    *,
    rows: int,
    seq_len: int,
) -> tuple[ExpectedCollective, ...]:
    """Collectives of a step that one repeat of a segment's group of blocks adds, in one micro-batch; an estimate.

    Those of ``expected_collectives`` are the sums of these, of ``end_collectives`` and of ``change_collectives``.

    Args:
        model, mesh, plan: with layouts by layer or without.
        segment: index of it.
        layout: of the group's layers (``sharding.layer_layouts``).
        policy: their remat policy.
        rows, seq_len: shape of the global micro-batch.
    """
    step = _Step(model, mesh, plan, rows, seq_len, 1, False, layout, policy)
    group, _ = model.config.segments[segment]
    found = [one for leaf in step.leaves()[segment] for one in step.weight(*leaf, 1)]
    found += [one for block in group for one in step.of_block(block)]
    return tuple(one for one in found if one.count and one.bytes and one.axes)


def end_collectives(
    model: Functional, mesh: Mesh | AbstractMesh, plan: ParallelConfig, first: str, *, rows: int, seq_len: int
) -> tuple[ExpectedCollective, ...]:
    """Collectives of a step outside layers, whose first is in the layout ``first``, see ``group_collectives``."""
    step = _Step(model, mesh, plan, rows, seq_len, 1, False)
    found = [one for leaf in step.leaves()[None] for one in step.weight(*leaf, None)]
    found += [*step.ends(first), *step.arranged()]
    return tuple(one for one in found if one.count and one.bytes and one.axes)


def change_collectives(
    model: Functional,
    mesh: Mesh | AbstractMesh,
    plan: ParallelConfig,
    *,
    before: str,
    later: str,
    rows: int,
    seq_len: int,
) -> tuple[ExpectedCollective, ...]:
    """Collectives of a step between two layers of other layouts, see ``group_collectives``.

    Args:
        model, mesh, plan: as there.
        before: layout of the earlier layer; "" for the embedding, which is in the layout ``tensor``.
        later: that of the later one; "" for the head, which is so too.
        rows, seq_len: shape of the global micro-batch.
    """
    step = _Step(model, mesh, plan, rows, seq_len, 1, False)
    if (before or AXIS) == (later or AXIS):
        return ()
    found = step.change(back=later == AXIS and before != "")
    return tuple(one for one in found if one.count and one.bytes and one.axes)


@dataclass(frozen=True)
class _Step:
    model: Functional
    mesh: Mesh | AbstractMesh
    plan: ParallelConfig
    rows: int  # rows of a micro-batch
    seq_len: int
    accumulate: int
    proven: bool
    layout: str = ""  # of the layers that are counted, where layers have layouts of their own
    policy: str = ""  # remat policy of the layers that are counted

    @property
    def rules(self) -> Rules:
        """Sharding rules of the layers that are counted; those of the model store weights."""
        by_layer = self.layout or self.model.rules.layouts
        return rules_of(self.model.rules, self.layout or AXIS) if by_layer else self.model.rules

    def layers_alike(self) -> dict[tuple[str, str], list[int]]:
        """Layers by their numbers, of each layout ("" where they have one) and remat policy."""
        config = self.model.config
        layouts = self._of_layers() if self.model.rules.layouts else [""] * len(config.blocks)
        found: dict[tuple[str, str], list[int]] = {}
        for number, key in enumerate(zip(layouts, policies_by_layer(config.remat, config.segments), strict=True)):
            found.setdefault(key, []).append(number)
        return found

    def _of_layers(self) -> list[str]:
        """Layout of each layer."""
        config = self.model.config
        pieces = zip(config.segments, layouts_by_segment(self.model.rules, config), strict=True)
        return [layout for (group, _), own in pieces for layout, count in own for _ in range(count * len(group))]

    def axes(self, *logical: str) -> tuple[str, ...]:
        """Mesh axes (of more than one device) that logical axes are split over."""
        names = (a for name in logical for a in self.rules.mesh_axes(name))
        return tuple(a for a in names if self.mesh.shape.get(a, 1) > 1)

    def size(self, axes: tuple[str, ...]) -> int:
        """Number of devices along mesh axes."""
        return math.prod(self.mesh.shape[a] for a in axes)

    def check(self) -> None:
        """Raises NotImplementedError for features whose formulas were never compared with a compiled step."""
        config = self.model.config
        tensor = self.size(self.axes("act_heads"))
        unknown = {
            f'remat = "{config.remat}"': config.remat != "full",
            f'residual = "{config.residual}"': config.residual != "plain",
            "a tied embedding": config.tied,
            "learned positions": config.learned_positions is not None,
            "experts folded with a split sequence, their width over tensor and axes that split tokens": self._mixes(),
            "experts with 2D tensor parallelism": bool(self._rows()) and bool(config.mixtures),
            'experts folded beside overlap = "ring"': self._folded() is not None and self.plan.overlap == "ring",
            "layouts by layer of routers that read the layer before": bool(self.model.rules.layouts)
            and config.pre_gated,
        }
        names = [name for name, is_so in unknown.items() if is_so]
        for block in dict.fromkeys(config.blocks):
            names += block.attention.without_traffic_formula(tensor, self.size(self.axes("attn_kv_heads")))
            names += block.mlp.without_traffic_formula(tensor)
            names += ["norms after a layer, over split tensors"] * (tensor > 1 and block.norms != "pre")
        if names:
            raise NotImplementedError(f"collective traffic with {', '.join(dict.fromkeys(names))}: no formula yet.")

    def _folded(self) -> dict[str, tuple[str, ...]] | None:
        """Mesh axes of the experts' logical axes, where they factor the devices in another way; else None."""
        folding = self.model.rules.folding
        return None if folding is None else folding.table(self.mesh.shape)

    def _mixes(self) -> bool:
        """Whether the experts' width is split over ``tensor`` and others, and the sequence over ``tensor`` too."""
        width = self._width()
        return self._folded() is not None and self.plan.sequence and "tensor" in width and len(width) > 1

    def _width(self) -> tuple[str, ...]:
        """Mesh axes that the width of experts is split over."""
        folded = self._folded()
        return self.axes("expert_mlp") if folded is None else folded["expert_mlp"]

    def weights(self) -> Iterator[ExpectedCollective]:
        """All-gathers of weights, and sums of their gradients (FSDP, data parallelism)."""
        config = self.model.config
        parts = layouts_by_segment(self.model.rules, config) if self.model.rules.layouts else []
        for segment, leaves in self.leaves().items():
            for leaf in leaves:
                for layout, layers in [("", None)] if segment is None or not parts else parts[segment]:
                    yield from replace(self, layout=layout).weight(*leaf, layers)

    def leaves(self) -> dict[int | None, list[tuple[str, Any, Any, bool]]]:
        """Parameters of each segment, and of none (None): path, array, logical axes, whether a matrix."""
        leaves = jax.tree_util.tree_leaves_with_path(self.model.abstract())
        logical = jax.tree.leaves(self.model.logical_axes(), is_leaf=lambda leaf: isinstance(leaf, tuple))
        found: dict[int | None, list[tuple[str, Any, Any, bool]]] = {None: []}
        for (path, leaf), axes, matrix in zip(leaves, logical, jax.tree.leaves(self.model.matrices()), strict=True):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            own = int(name.split("/")[1]) if axes and axes[0] == "layers" else None
            found.setdefault(own, []).append((name, leaf, axes, matrix))
        return found

    def weight(
        self, name: str, leaf: Any, logical: Any, matrix: bool, repeats: int | None
    ) -> Iterator[ExpectedCollective]:
        """Collectives of a parameter: of so many of its layers, or of all that it has (None)."""
        if repeats is not None:
            leaf = jax.ShapeDtypeStruct((repeats, *leaf.shape[1:]), leaf.dtype)
        rules, zero, micro = self.rules, self.plan.zero, self.accumulate
        layers = leaf.shape[0] if logical[0] == "layers" else 1
        spec = self.model.rules.spec(logical, self.mesh)
        stored, used = _axes(spec), _axes(rules.spec(logical, self.mesh, gathered=True))
        over = tuple(a for a in stored if a not in used)
        tokens = self.axes(*TOKENS) if matrix or not self.plan.sequence else self.axes("batch", "residual_seq")
        dtype = self.model.config.dtype if matrix else leaf.dtype
        if name.endswith("/router"):
            dtype = jnp.promote_types(dtype, jnp.float32)
            folded = self._folded()
            tokens = tokens if folded is None else (*self.axes("batch"), *self._there(folded["router_seq"]))
        rest = tuple(a for a in tokens if a not in stored)
        width = jnp.dtype(dtype).itemsize
        whole = math.prod(leaf.shape) // self.size(used) * width
        part = whole // self.size(over)
        uses = 2 if layers > 1 or "segments" in name else 1
        stacked = logical[0] == "layers"  # used, and summed, layer by layer
        own = jax.P(*spec[stacked:])
        outer = tuple(a for a in rules.between_steps if a in over)
        if outer:
            yield from self._levels(leaf, spec, over, outer, matrix, stacked, uses, whole, width)
            return
        last = between(own, rules.spec(logical, self.mesh, gathered=True))
        if last is not None:  # one axis after the other
            first, size = tuple(a for a in over if a != AXIS), whole // layers // self.size((AXIS,))
            count = layers * micro
            yield from self._gather(matrix, first, uses * count, leaf.shape[stacked:], own, size, width)
            yield from self._gather(matrix, (AXIS,), uses * count, leaf.shape[stacked:], last, whole // layers, width)
            yield ExpectedCollective("reduce-scatter", (AXIS,), count, whole // layers, "gradients")
            yield ExpectedCollective("reduce-scatter", first, count, size, "gradients")
            yield from self._sums(leaf.shape[stacked:], own, rest, matrix, count, part // layers)
            return
        if zero in (3, "3level"):
            yield from self._gather(
                matrix, over, uses * layers * micro, leaf.shape[stacked:], own, whole // layers, width
            )
            yield ExpectedCollective("reduce-scatter", over, layers * micro, whole // layers, "gradients")
            yield from self._sums(leaf.shape[stacked:], own, rest, matrix, layers * micro, part // layers)
            return
        late = zero == 1 and matrix and micro > 1
        wide = jnp.dtype(leaf.dtype).itemsize / width if late else 1
        yield from self._gather(matrix, over, 1, leaf.shape, spec, whole, width)
        yield ExpectedCollective("reduce-scatter", over, 1 if late else micro, int(whole * wide), "gradients")
        yield from self._sums(leaf.shape, spec, rest, matrix, 1 if late else micro, int(part * wide))

    def _levels(
        self,
        leaf: Any,
        spec: jax.P,
        over: tuple[str, ...],
        outer: tuple[str, ...],
        matrix: bool,
        stacked: bool,
        uses: int,
        whole: int,
        width: int,
    ) -> Iterator[ExpectedCollective]:
        """All-gathers and sums of a weight of 3-level ZeRO, which is split over the axes ``outer`` between steps."""
        micro, layers = self.accumulate, leaf.shape[0] if stacked else 1
        if not matrix:  # whole during a step
            yield ExpectedCollective("all-gather", over, 1, whole, ONCE[0])
            yield ExpectedCollective("all-reduce", self.axes(*TOKENS), layers * micro, whole // layers, "gradients")
            return
        inner = tuple(a for a in over if a not in outer)
        size = whole // self.size(over)
        for axis in reversed(outer):
            before, spec = spec, without_axes(spec, frozenset({axis}))
            size *= self.size((axis,))
            yield from self._gather(matrix, (axis,), 1, leaf.shape, before, size, width, ONCE[0])
        own, shape = jax.P(*spec[stacked:]), leaf.shape[stacked:]
        yield from self._gather(matrix, inner, uses * layers * micro, shape, own, whole // layers, width)
        yield ExpectedCollective("reduce-scatter", inner, layers * micro, whole // layers, "gradients")
        wide = jnp.dtype(leaf.dtype).itemsize / width
        for axis in outer:
            last = axis == outer[-1]
            summed = int(size * wide) if last and micro > 1 else size
            yield ExpectedCollective(
                "reduce-scatter", (axis,), 1 if last else micro, summed, ONCE[1] if last else "gradients"
            )
            size //= self.size((axis,))

    def _gather(
        self,
        matrix: bool,
        over: tuple[str, ...],
        count: int,
        shape: tuple[int, ...],
        spec: jax.P,
        size: int,
        width: int,
        why: str = "weights",
    ) -> Iterator[ExpectedCollective]:
        """All-gather of a weight, plain or in 8 bits (``sharding.int8_gather``).

        Args:
            shape: of the whole weight.
            spec: its partition spec before.
            size: bytes of the result.
            width: of one value.
        """
        block = block_of(shape, spec, self.mesh.shape) if matrix and self.rules.int8_gather else 0
        if not block:
            yield ExpectedCollective("all-gather", over, count, size, why)
            return
        values = size // width
        yield ExpectedCollective("all-gather", over, count, values, why)
        yield ExpectedCollective("all-gather", over, count, values // block * 4, why)

    def _sums(
        self, shape: tuple[int, ...], spec: jax.P, over: tuple[str, ...], matrix: bool, count: int, size: int
    ) -> Iterator[ExpectedCollective]:
        """Sums of a gradient over axes that do not split it: flat, or in two levels (``sharding.partial_sums``)."""
        others = tuple(axis for axis in over if axis != LOCAL)
        two_level = self.rules.two_level and matrix and others and LOCAL in over
        if not two_level or spec_of_parts(shape, spec, self.mesh.shape) is None:
            yield ExpectedCollective("all-reduce", over, count, size, "gradients")
            return
        yield ExpectedCollective("reduce-scatter", (LOCAL,), count, size, "gradients")
        yield ExpectedCollective("all-reduce", others, count, size // self.size((LOCAL,)), "gradients")
        yield ExpectedCollective("all-gather", (LOCAL,), count, size, "sums of gradients")

    def activations(self) -> Iterator[ExpectedCollective]:
        """Collectives of activations: those of tensor, sequence, context and expert parallelism."""
        config, micro = self.model.config, self.accumulate
        for (layout, policy), numbers in self.layers_alike().items():
            own = replace(self, layout=layout, policy=policy)
            for block, layers in Counter(config.blocks[number] for number in numbers).items():
                for one in own.of_block(block):
                    yield replace(one, count=one.count * layers * micro)
        first = self._of_layers()[0] if self.model.rules.layouts else AXIS
        for one in (*self.ends(first), *self.arranged()):
            yield replace(one, count=one.count * micro)

    @property
    def _tokens(self) -> int:
        """Tokens of a micro-batch on a device."""
        return self.rows * self.seq_len // self.size(self.axes(*TOKENS))

    def of_block(self, block: BlockConfig) -> Iterator[ExpectedCollective]:
        """Collectives of activations in one layer, for one micro-batch."""
        for part in (self._residual, self._rows_of_layer, self._attention, self._experts):
            yield from part(block, self._tokens)

    def between_layouts(self) -> Iterator[ExpectedCollective]:
        """Collectives of the residual stream between layers of different layouts; embedding and head split heads.

        Where ``tensor`` splits the sequence, rows are exchanged for parts of it. Else one of the two passes takes a
        part of what the device has, and the other all-gathers. Segment ids are all-gathered for layers with all rows.
        """
        if not self.model.rules.layouts:
            return
        each = self._of_layers()
        for number, (before, later) in enumerate(itertools.pairwise((AXIS, *each, AXIS))):
            if before != later:
                for one in self.change(back=later == AXIS and number < len(each)):
                    yield replace(one, count=one.count * self.accumulate)

    def change(self, back: bool) -> Iterator[ExpectedCollective]:
        """Collectives between two layers of other layouts, for one micro-batch; ``back`` to layers with all rows."""
        over, stream = self._columns(), self._bytes(self._tokens, self.model.config.embed_dim)
        if self.plan.sequence:
            yield ExpectedCollective("all-to-all", over, 2, stream // self.size(over), "between layouts")
        else:
            yield ExpectedCollective("all-gather", over, 1, stream, "between layouts")
        yield ExpectedCollective("all-gather", over, int(back), self._tokens * 4, "segment ids")

    @property
    def passes(self) -> int:
        """Forward passes of a block: 2 where the backward pass recomputes it (full remat)."""
        return 2 if (self.policy or self.model.config.remat) == "full" else 1

    def _bytes(self, *dims: int) -> int:
        return math.prod(dims) * jnp.dtype(self.model.config.dtype).itemsize

    def _residual(self, block: BlockConfig, tokens: int) -> Iterator[ExpectedCollective]:
        """Residual stream into and out of attention and the feed-forward layer, forward and backward.

        The recomputation of a block leaves out the collectives whose results the backward pass does not need. Experts
        whose width is not split over ``tensor`` alone have others (``_experts``).
        """
        tensor, stream = self._columns(), self._bytes(tokens, self.model.config.embed_dim) // self.size(self._rows())
        if block.mlp.mixture is not None and self._width() != tensor:
            gathers, sums = 1 + self.passes, 1 + self.passes
        else:
            gathers, sums = 2 + 2 * self.passes, 3 + self.passes
        if self.plan.overlap == "ring":
            # The recomputation leaves out the sum of the last matmul, as below; the gathered sequence is kept for the
            # weight gradients.
            around = self.size(tensor) - 1
            yield ExpectedCollective(
                "collective-permute", tensor, around * (5 + 3 * self.passes), stream // self.size(tensor), "activations"
            )
        elif self.plan.sequence:
            yield ExpectedCollective("all-gather", tensor, gathers, stream, "activations")
            yield ExpectedCollective("reduce-scatter", tensor, sums, stream, "activations")
        else:
            yield ExpectedCollective("all-reduce", tensor, sums, stream, "activations")

    def _rows(self) -> tuple[str, ...]:
        """Mesh axes that the residual stream's features are split over (2D tensor parallelism)."""
        return self.axes("act_embed")

    def _columns(self) -> tuple[str, ...]:
        """Mesh axes that heads and width of a layer's weights are split over."""
        return self.axes("heads")

    def _rows_of_layer(self, block: BlockConfig, tokens: int) -> Iterator[ExpectedCollective]:
        """Collectives over ``features`` of a dense block: sums of projections, gathers of what they are used for.

        Results of q, k, v, gate and up are reduce-scattered; results of attention and inner activations all-gathered
        before the matmul that they enter. Backward: the other of the two, in reverse. Norms sum their squares.
        """
        if not (rows := self._rows()):
            return
        attention, columns, passes = block.attention, self.size(self._columns()), self.passes
        queries, inner = attention.heads * attention.key_dim, block.mlp.inner_widths(self.model.config.embed_dim)
        values = attention.kv_heads * (attention.key_dim + attention.value_dim)
        first = self._bytes(tokens, (queries + values + inner["gate"] + inner["up"]) // columns)
        second = self._bytes(tokens, (attention.heads * attention.value_dim + inner["up"]) // columns)
        yield ExpectedCollective("reduce-scatter", rows, passes, first, "projections")
        yield ExpectedCollective("all-gather", rows, 1, first, "their gradients")
        yield ExpectedCollective("all-gather", rows, passes, second, "inputs of the last matmuls")
        yield ExpectedCollective("reduce-scatter", rows, 1, second, "their gradients")
        yield from self._norms(2, passes, tokens)

    def _norms(self, count: int, passes: int, tokens: int) -> Iterator[ExpectedCollective]:
        """Sums of squares of RMSNorms over split features, forward and backward."""
        wide = jnp.promote_types(self.model.config.dtype, jnp.float32).itemsize
        here = tokens // self.size(self._columns()) if self.plan.sequence else tokens
        yield ExpectedCollective("all-reduce", self._rows(), count * (passes + 1), here * wide, "norms")

    def ends(self, first: str) -> Iterator[ExpectedCollective]:
        """Collectives of the embedding, with ``first`` the layout of the first layer, and of the loss, whose vocabulary
        is split; for one micro-batch."""
        tensor, rows, tokens = self._columns(), self._rows(), self._tokens
        stream = self._bytes(tokens, self.model.config.embed_dim) // self.size(rows)
        wide = jnp.promote_types(self.model.config.dtype, jnp.float32).itemsize
        vocab = self.axes("act_vocab")
        yield ExpectedCollective("all-reduce", vocab, 1, 3 * tokens * wide, "softmax over the vocabulary")
        if rows:
            yield ExpectedCollective("all-gather", rows, 1, stream * self.size(rows), "loss")
            yield ExpectedCollective("reduce-scatter", rows, 1, stream * self.size(rows), "loss, backward")
            head = self._bytes(self.model.config.vocab_size, self.model.config.embed_dim) // self.size(vocab)
            yield ExpectedCollective("all-to-all", rows, 2, head, "output matrix by vocabulary alone, its gradient")
            yield from self._norms(1, 1, tokens)
        if self.plan.sequence:
            yield ExpectedCollective("reduce-scatter", tensor, 1, stream, "embedding")
            yield ExpectedCollective("all-gather", tensor, 2, stream, "embedding, backward, and loss")
            yield ExpectedCollective("reduce-scatter", tensor, 1, stream, "loss, backward")
        elif first != AXIS:
            # Each device of the first layers reads a part of the rows alone.
            yield ExpectedCollective("reduce-scatter", tensor, 1, stream, "embedding")
            yield ExpectedCollective("all-reduce", tensor, 1, stream, "loss, backward")
        else:
            yield ExpectedCollective("all-reduce", tensor, 2, stream, "embedding; loss, backward")

    def _attention(self, block: BlockConfig, tokens: int) -> Iterator[ExpectedCollective]:
        attention, passes = block.attention, self.passes
        if attention.kv_spec.latent:
            return  # split heads are counted with the residual stream
        rows = self.rows // self.size(self.axes("batch"))
        split, ring = self.axes("attn_seq"), self.axes("attn_kv_seq")
        ulysses = self.axes("seq")[len(split) :]
        heads = attention.heads // self.size(self.axes("act_heads"))
        shards = self.size(self.axes("attn_kv_heads"))
        kv_heads = max(attention.kv_heads, shards) // shards
        if ulysses:
            kv = kv_heads * self.size(ulysses)
            for count in (heads, heads, kv, kv):
                size = self._bytes(tokens, count, attention.key_dim)
                yield ExpectedCollective("all-to-all", ulysses, 1 + passes, size, "queries, keys, values, results")
            ids = rows * self.seq_len // self.size(self.axes("attn_seq")) * 4
            yield ExpectedCollective("all-gather", ulysses, passes, ids, "segment ids")
        if split and not ring:
            gathered = rows * self.seq_len
            kv = self._bytes(gathered, 2, kv_heads, attention.key_dim)
            yield ExpectedCollective("all-gather", split, passes, kv + gathered * 4, "keys, values, segment ids")
            yield ExpectedCollective("reduce-scatter", split, 1, kv, "their gradients")
        if ring:
            steps = self.size(ring) - 1
            if steps == 1 and self.proven:
                raise NotImplementedError(
                    "collective traffic of a ring of two devices, whose passes share transfers: no formula yet."
                )
            if self.proven and block.attention.window is not None and self.plan.layout == "contiguous":
                raise NotImplementedError(
                    "collective traffic of ring attention that a sliding window ends early: no formula yet."
                )
            here = tokens * self.size(ulysses)
            kv = self._bytes(here, 2, kv_heads, attention.key_dim)
            wide = kv * 4 // jnp.dtype(self.model.config.dtype).itemsize
            yield ExpectedCollective(
                "collective-permute", ring, steps * passes, kv + here * 4, "keys and values, forward"
            )
            yield ExpectedCollective(
                "collective-permute", ring, steps, kv + here * 4 + wide, "keys and values, backward"
            )
            yield ExpectedCollective("collective-permute", ring, 1, wide, "their gradients, one step behind")
            yield ExpectedCollective("collective-permute", ring, 1, kv, "their gradients, home")

    def _experts(self, block: BlockConfig, tokens: int) -> Iterator[ExpectedCollective]:
        folded = self._folded()
        over = self.axes("experts") if folded is None else folded["experts"]
        if (moe := block.mlp.mixture) is None:
            return
        yield from self._between_factorings(moe, tokens)
        tokens = self._sent_tokens(tokens)
        rows = tokens * moe.top_k
        if moe.capacity is not None:
            buffer = self._bytes(
                moe.experts * room_of_expert(moe.capacity, tokens, moe.top_k, moe.experts), self.model.config.embed_dim
            )
            yield ExpectedCollective("all-to-all", over, 2 + 2 * self.passes, buffer, "rows to experts and back")
            return
        room = receive_rows(rows, self.size(over))
        there, back = (self._bytes(n, self.model.config.embed_dim) for n in (rows, room))
        scale = jnp.promote_types(self.model.config.dtype, jnp.float32).itemsize
        # One round, as with balanced routing. Whatever the remat policy, the backward pass sends rows again, and their
        # gradients beside them.
        yield ExpectedCollective("ragged-all-to-all", over, 3, there, "tokens to experts; the gradients of results")
        yield ExpectedCollective("ragged-all-to-all", over, 2, back, "results back; the gradients of tokens")
        slots = self.size(over) * rows * scale
        yield ExpectedCollective("all-to-all", over, 3, slots, "the tokens' combine weights, and their gradients")

    def _sent_tokens(self, tokens: int) -> int:
        """Tokens that a device sends to experts, where it has so many elsewhere."""
        if (folded := self._folded()) is None:
            return tokens
        there = self.size(self._there((*folded["expert_batch"], *folded["expert_seq"])))
        return tokens * self.size(self.axes(*TOKENS)) // there

    def _there(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Those of the mesh axes that have more than one device."""
        return tuple(axis for axis in axes if self.mesh.shape.get(axis, 1) > 1)

    def _between_factorings(self, moe: MoeConfig, tokens: int) -> Iterator[ExpectedCollective]:
        """Collectives of tokens between the devices' factoring for attention and that for experts."""
        config, width, tensor = self.model.config, self._width(), self.axes("act_heads")
        wide = jnp.promote_types(config.dtype, jnp.float32).itemsize
        if tensor and "tensor" not in width:  # each device routes a part of the tokens
            over, scores, chosen = tensor, tokens * moe.experts * wide, tokens * moe.top_k * 4
            yield ExpectedCollective("all-gather", over, 1, 2 * scores + chosen, "routing of all tokens")
            yield ExpectedCollective("all-gather", over, self.passes - 1, scores + chosen, "routing, again")
            if not self.plan.sequence:
                stream = self._bytes(tokens, config.embed_dim)
                yield ExpectedCollective("all-gather", over, 2, stream, "results of experts; gradients of tokens")
        sent = self._sent_tokens(tokens)
        stream, weights = self._bytes(sent, config.embed_dim), sent * moe.top_k * wide
        if (apart := tuple(axis for axis in width if axis != "tensor")) == ():
            yield ExpectedCollective("all-reduce", width, 1, weights, "gradients of combine weights")
            return
        chosen = weights + sent * moe.top_k * 4
        yield ExpectedCollective("all-gather", apart, self.passes, stream + chosen, "tokens to shards of the width")
        yield ExpectedCollective("all-gather", apart, 1, stream, "gradients of their results")
        yield ExpectedCollective("reduce-scatter", width, 2, stream, "results of the width; gradients of tokens")
        yield ExpectedCollective("reduce-scatter", width, 1, weights, "gradients of combine weights")

    def arranged(self) -> Iterator[ExpectedCollective]:
        """All-gathers that bring the four arrays of a batch into the order of the layout."""
        if self.plan.layout != "contiguous":
            size = self.rows // self.size(self.axes("batch")) * self.seq_len * 4
            over = self.axes("seq") if self.axes("attn_seq") else ()
            yield ExpectedCollective("all-gather", over, 4, size, "the batch in the layout's order")


def _axes(spec: Any) -> tuple[str, ...]:
    return tuple(a for part in spec if part is not None for a in (part if isinstance(part, tuple) else (part,)))
