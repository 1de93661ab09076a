"""Packed weights: matrices kept in few bits in memory, and dequantised where they are multiplied.

A ``PackedWeight`` takes the place of an array in a parameter tree. A scan over layers slices it like an array, and it
is sharded like the array: its values have the weight's logical axes, and its format says those of the scales. It has
no gradients. Formats are rows of ``jaxllm.quant.formats``.

Legend: E experts, A rows and B columns of an expert's matrix, M token rows.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

import sharding
from jaxllm.models.params import at_least_f32
from pallas_kernels._compat import manual_on_one_device, target_device, vary_over, varying_axes
from pallas_kernels._dispatch import may_be_default
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.packed_matmul import PackedCodes, packed_matmul
from pallas_kernels.packed_matmul.native import (
    FEWEST,
    MOST_ROWS,
    NativeForm,
    stored_matmul,
    stored_row_matmul,
    unsupported,
    vectors,
)
from sharding import LogicalAxes

DEQUANTISED_BYTES = 2**29
"""Bytes of experts' matrices that are dequantised at a time."""
FEW_ROWS = {"cpu": 1, "tpu": 16, "gpu": 16}
"""Rows of an expert that are multiplied with packed codes, by platform; with more, XLA:CPU writes the dense matrix."""
TILE_BYTES = {"cpu": 2**21, "tpu": 2**24, "gpu": 2**24}
"""Bytes of an output matrix's rows that are dequantised at a time, by platform: what caches hold until the matmul."""

BYTE_ROWS = 32
"""Rows of bytes that a TPU's tile has."""
GPU_ROWS = 128
"""Most hidden states that a kernel for GPUs multiplies with packed rows."""
FEW_LOOKUPS = 256
"""Tokens whose rows of an embedding in bytes are looked up with the tiles that they lie in."""


@runtime_checkable
class WeightFormat(Protocol):
    """Format of packed weights, static and hashable. Axes are counted from the end.

    ``pack`` and ``unpack`` see one shard of a weight, and no scale is shared by two shards.
    """

    def shape(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the dense weight whose packed values have this shape."""
        ...

    def pack(self, weight: Float[Array, "..."]) -> tuple[Array, Array]:
        """Values and scales of a weight.

        Raises:
            ValueError: a size does not fit the format; says which would.
        """
        ...

    def unpack(self, values: Array, scales: Array, dtype: DTypeLike) -> Float[Array, "..."]:
        """Dense weight: value times scale, rounded to ``dtype``."""
        ...

    def scale_axes(self, axes: LogicalAxes) -> LogicalAxes:
        """Logical axes of the scales of a weight with these; a dimension that shares one scale has None."""
        ...


@runtime_checkable
class FusedFormat(Protocol):
    """Format whose matmul is a sum of matmuls with weights that XLA unpacks within them."""

    def shape(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the dense weight, see ``WeightFormat``."""
        ...

    def terms(self, x: Float[Array, "... I"], values: Array, scales: Array) -> list[tuple[Array, Array]]:
        """Activations and weights, with one dimension of inputs, whose products' sum is that of the dense weight."""
        ...

    def kernel_terms(
        self, x: Float[Array, "... I"], values: Array, scales: Array
    ) -> tuple[Array, Array, PackedCodes, list[tuple[Array, Array]]] | None:
        """Operands of ``packed_matmul`` after the activations, and terms to add; None where it has no such codes."""
        ...


@runtime_checkable
class NativeFormat(Protocol):
    """Format whose arrays the kernel for CPUs reads as they are stored, see ``pallas_kernels.packed_matmul.native``."""

    def shape(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the dense weight, see ``WeightFormat``."""
        ...

    def native_form(self, inputs: int, scales: tuple[int, ...], contract: int) -> NativeForm | None:
        """Codes and parameters of a weight for the kernel, from the shape of its scales; None where it has no such."""
        ...

    def unpack(self, values: Array, scales: Array, dtype: DTypeLike) -> Float[Array, "..."]:
        """Dense weight, see ``WeightFormat``."""
        ...


@runtime_checkable
class RowFormat(Protocol):
    """Format of embeddings and output matrices [V, D], whose axis is the last: codes and scales are of rows."""

    def shape(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the dense matrix, see ``WeightFormat``."""
        ...

    def row_terms(self, x: Float[Array, "T D"], values: Array, scales: Array) -> list[tuple[Array, Array]]:
        """Activations and weights [V, inputs], the sum of whose products ``x w^T`` is that of the dense matrix."""
        ...

    def native_row_form(self, inputs: int, scales: tuple[int, ...]) -> NativeForm | None:
        """Rows for the kernel for CPUs, see ``NativeFormat``."""
        ...

    def row_codes(self, inputs: int, scales: tuple[int, ...]) -> PackedCodes | None:
        """Rows for ``packed_matmul``, whose result is in float32; None where its kernels for GPUs do not take them."""
        ...

    def unpack(self, values: Array, scales: Array, dtype: DTypeLike) -> Float[Array, "..."]:
        """Dense matrix, see ``WeightFormat``."""
        ...


@runtime_checkable
class ActivationFormat(Protocol):
    """Format whose matmul rounds the activations too."""

    @property
    def depends_on_batch(self) -> bool:
        """Whether a token's result depends on the other tokens of the call."""
        ...

    def round_activations(self, x: Float[Array, "... I"]) -> Float[Array, "... I"]:
        """The values that activations have when they are multiplied."""
        ...

    def multiply(
        self, x: Float[Array, "... I"], values: Array, scales: Array, over: tuple[str, ...], tokens: tuple[str, ...]
    ) -> Float[Array, "..."]:
        """Matmul of one device's tokens and inputs, in at least float32.

        Args:
            over: mesh axes that the inputs are split over.
            tokens: mesh axes that the tokens are split over.
        """
        ...


@runtime_checkable
class RowwiseFormat(Protocol):
    """Format of experts with a kernel that multiplies each row with its own expert's matrix."""

    def multiply_rows(
        self, rows: Float[Array, "M A"], experts: Int[Array, " M"], values: Array, scales: Array
    ) -> Float[Array, "M B"] | None:
        """The products, zeros where an expert's number is not that of one; None where no kernel takes them."""
        ...


@runtime_checkable
class HostPackedFormat(Protocol):
    """Format whose arrays have sizes that depend on the weight's values, so that ``jax.jit`` cannot pack it."""

    def pack_on_host(self, weight: Float[Array, "..."]) -> tuple[np.ndarray, np.ndarray, WeightFormat]:
        """Values, scales and the format that knows their sizes.

        Raises:
            ValueError: a weight that does not fit; says why.
        """
        ...


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values", "scales"], meta_fields=["format"])
@dataclass(frozen=True)
class PackedWeight:
    """Packed weight, a ``jaxllm.models.linear.Weight``; both arrays have the same leading dimensions (layers, experts).

    Attributes:
        values: packed values.
        scales: scales of groups of values.
        format: how the two stand for a dense weight.
    """

    values: Any
    scales: Any
    format: WeightFormat

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dense weight."""
        return self.format.shape(self.values.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.nbytes + self.scales.nbytes

    def gather(self, dtype: DTypeLike, axes: LogicalAxes, unreduced_grad: bool) -> PackedWeight:
        """The packed weight all-gathered over its storage axes: packed bytes travel."""
        values, scales = (
            sharding.gather_weight(x, *names)
            for x, names in zip((self.values, self.scales), self.array_axes(axes), strict=True)
        )
        return replace(self, values=values, scales=scales)

    def array_axes(self, axes: LogicalAxes) -> list[LogicalAxes]:
        """Logical axes of values and scales of a weight with these; a scale of all inputs goes to every shard."""
        names = self.format.scale_axes(axes)
        if getattr(self.format, "group", 0) is None:
            names = tuple(None if size == 1 else name for name, size in zip(names, self.scales.shape, strict=True))
        return [axes, names]

    def dense(self, dtype: DTypeLike) -> Float[Array, "..."]:
        """Dequantised weight."""
        unpack = functools.partial(self.format.unpack, dtype=dtype)
        return sharding.by_shard(unpack, self.values, self.scales)

    def project(self, x: Array, out: LogicalAxes, contract: int) -> Array:
        """Matmul with the dequantised weight, or of rounded activations in integers where the format says so.

        Every device multiplies its shard: with a kernel, or XLA unpacks it within the matmul. For few rows the dense
        weight is never written.
        """
        if isinstance(self.format, ActivationFormat):
            return _rounded_project(self.format, out, contract, x, self.values, self.scales)
        if isinstance(self.format, FusedFormat):
            return sharding.project_by_shard(
                functools.partial(_fused_matmul, self.format, contract), x, (self.values, self.scales), out, contract
            ).astype(x.dtype)
        return sharding.project(x, self.dense(x.dtype), out, contract=contract)

    def lookup(self, ids: Int[Array, "B S"], dtype: DTypeLike, out: LogicalAxes) -> Float[Array, "B S D"]:
        """Rows of an embedding, dequantised; the others are not."""
        rows = (
            _rows(x, ids, axes)
            for x, axes in zip((self.values, self.scales), (out, self.format.scale_axes(out)), strict=True)
        )
        return sharding.by_shard(functools.partial(self.format.unpack, dtype=dtype), *rows)

    def logits(self, x: Float[Array, "B S D"], out: LogicalAxes) -> Float[Array, "B S V"]:
        """Matmul of hidden states and every row of an output matrix, whose shard each device dequantises by itself."""
        form = self.format
        if not isinstance(form, RowFormat):
            return sharding.einsum("bsd,vd->bsv", x, self.dense(x.dtype), out=out)

        def multiply(x: Array, turned: Array, scales: Array, over: tuple[str, ...], tokens: tuple[str, ...]) -> Array:
            y = _row_matmul(form, x.reshape(-1, x.shape[-1]), turned.T, scales)
            return y.reshape(*x.shape[:-1], y.shape[-1])

        # project_by_shard takes the inputs from the first dimension; the transposes cancel.
        return sharding.project_by_shard(multiply, x, (self.values.T, self.scales), out, 1)

    def grouped_matmul(self, rows: Float[Array, "M A"], sizes: Int[Array, " E"]) -> Float[Array, "M B"]:
        """``grouped_matmul`` with matrices that are dequantised a few experts at a time, and only those with rows.

        At a time: as many experts as fit ``DEQUANTISED_BYTES``; in decode, and of a ``RowwiseFormat`` always, one.
        In decode those with as few rows as ``FEW_ROWS`` are multiplied as ``project`` does: by the kernel on TPUs and
        GPUs, unpacked within the matmul on CPUs.
        """
        if isinstance(self.format, ActivationFormat):
            rows = self.format.round_activations(rows)
        experts, inner, columns = self.shape
        form = self.format
        if isinstance(form, RowwiseFormat) and rows.shape[0] <= experts:  # more was not measured
            own = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(rows.shape[0]), side="right")
            if (found := form.multiply_rows(rows, own, self.values, self.scales)) is not None:
                return found
        few = min(FEW_ROWS[target_device().platform], rows.shape[0]) if isinstance(form, FusedFormat) else 0
        decodes = rows.shape[0] <= experts * max(few, 1)
        alone = decodes or isinstance(form, RowwiseFormat)
        most = 1 if alone else max(1, DEQUANTISED_BYTES // (inner * columns * rows.dtype.itemsize))
        chunk = max(n for n in range(1, min(experts, most) + 1) if experts % n == 0)
        starts = jnp.cumsum(sizes) - sizes

        def some(i: Array, out: Array) -> Array:
            def part(x: Array) -> Array:
                return jax.lax.dynamic_slice_in_dim(x, i * chunk, chunk)

            own, start = part(sizes), starts[i * chunk]

            def dequantised(out: Array) -> Array:
                matrices = self.format.unpack(part(self.values), part(self.scales), rows.dtype)
                return out + jnp.roll(grouped_matmul(jnp.roll(rows, -start, axis=0), matrices, own), start, axis=0)

            def packed(out: Array) -> Array:
                assert isinstance(form, FusedFormat)
                first = jnp.roll(rows, -start, axis=0)[:few]
                y = _fused_matmul(form, 1, first, part(self.values)[0], part(self.scales)[0], (), ())
                y = jnp.where(jnp.arange(few)[:, None] < own[0], y, 0).astype(out.dtype)
                return out + jnp.roll(jnp.pad(y, ((0, rows.shape[0] - few), (0, 0))), start, axis=0)

            ways = [lambda out: out, dequantised, packed] if decodes and few else [lambda out: out, dequantised]
            way = jnp.where(own[0] <= few, 2, 1) if len(ways) > 2 else 1
            return jax.lax.switch(jnp.where(jnp.any(own > 0), way, 0), ways, out)

        out = vary_over(jnp.zeros((rows.shape[0], columns), rows.dtype), varying_axes(rows, self.values, self.scales))
        return jax.lax.fori_loop(0, experts // chunk, some, out)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values", "scales", "layer"], meta_fields=["format"])
@dataclass(frozen=True)
class StackedLayer(PackedWeight):
    """One layer of packed weights in their stack, where the kernel for CPUs reads it: a slice would be a copy.

    Attributes:
        values, scales: those of all layers.
        layer: number of the layer.
    """

    layer: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the layer's dense weight."""
        return self.format.shape(self.values.shape[1:])

    def gather(self, dtype: DTypeLike, axes: LogicalAxes, unreduced_grad: bool) -> PackedWeight:
        """The weight itself, which is on one device."""
        return self

    def dense(self, dtype: DTypeLike) -> Float[Array, "..."]:
        """Dequantised weight."""
        return self._slice().dense(dtype)

    def project(self, x: Array, out: LogicalAxes, contract: int) -> Array:
        """Matmul with the dequantised weight."""
        found = _native_matmul(self.format, contract, x, self.values, self.scales, self.layer)
        return self._slice().project(x, out, contract) if found is None else found.astype(x.dtype)

    def grouped_matmul(self, rows: Float[Array, "M A"], sizes: Int[Array, " E"]) -> Float[Array, "M B"]:
        """Grouped matmul of the layer's experts."""
        return self._slice().grouped_matmul(rows, sizes)

    def _slice(self) -> PackedWeight:
        return PackedWeight(_at(self.values, self.layer), _at(self.scales, self.layer), self.format)


def within_stack(params: Any) -> tuple[Any, Callable[[Any, Any], Any]]:
    """Splits stacked parameters into those that a scan slices, and packed weights that stay whole.

    The latter are those that the kernel for CPUs may multiply, on one device.

    Returns:
        The parameters without them, and ``join(slice, layer)``, which puts them, as ``StackedLayer``s, into a slice.
    """
    if target_device().platform != "cpu" or sharding.current_mesh() is not None or not has_packed(params):
        return params, lambda own, layer: own
    leaves, tree = jax.tree.flatten(params, is_leaf=is_packed)
    kept = [is_packed(leaf) and leaf.values is not None and _may_be_native(leaf.format) for leaf in leaves]
    if not any(kept) or not may_be_default("packed_matmul", "native"):
        return params, lambda own, layer: own

    def join(own: Any, layer: Any) -> Any:
        slices = zip(leaves, kept, tree.flatten_up_to(own), strict=True)
        whole = [StackedLayer(a.values, a.scales, a.format, layer) if keep else one for a, keep, one in slices]
        return jax.tree.unflatten(tree, whole)

    return jax.tree.unflatten(tree, [None if keep else a for a, keep in zip(leaves, kept, strict=True)]), join


def _may_be_native(form: Any) -> bool:
    return isinstance(form, NativeFormat) and not isinstance(form, ActivationFormat)


def _at(stack: Array, layer: Any) -> Array:
    return jax.lax.dynamic_index_in_dim(stack, layer, keepdims=False)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _rounded_project(form: Any, out: LogicalAxes, contract: int, x: Array, values: Array, scales: Array) -> Array:
    """Matmul of activations that are rounded; its gradient is that of the dense weight (straight-through)."""

    def multiply(x: Array, values: Array, scales: Array, over: tuple[str, ...], tokens: tuple[str, ...]) -> Array:
        return form.multiply(x.reshape(*x.shape[: x.ndim - contract], -1), values, scales, over, tokens)

    return sharding.project_by_shard(multiply, x, (values, scales), out, contract).astype(x.dtype)


def _rounded_forward(
    form: Any, out: LogicalAxes, contract: int, x: Array, values: Array, scales: Array
) -> tuple[Array, tuple[Array, Array, Array]]:
    return _rounded_project(form, out, contract, x, values, scales), (x, values, scales)


def _rounded_backward(
    form: Any, out: LogicalAxes, contract: int, kept: tuple[Array, Array, Array], dy: Array
) -> tuple[Array, None, None]:
    x, values, scales = kept
    dense = PackedWeight(values, scales, form).dense(x.dtype)
    _, back = jax.vjp(lambda x: sharding.project(x, dense, out, contract=contract), x)
    return back(dy)[0], None, None


_rounded_project.defvjp(_rounded_forward, _rounded_backward)


def _fused_matmul(
    form: FusedFormat,
    contract: int,
    x: Array,
    values: Array,
    scales: Array,
    over: tuple[str, ...],
    tokens: tuple[str, ...],
) -> Array:
    """Matmul of one device's shards, in at least float32 but for Pallas kernels', which have the dtype of x."""
    if (y := _native_matmul(form, contract, x, values[None], scales[None], 0)) is not None:
        return y
    rows = x.reshape(*x.shape[: x.ndim - contract], -1)
    if target_device().platform == "cpu" or (found := form.kernel_terms(rows, values, scales)) is None:
        parts = [_wide_dot(part, weight) for part, weight in form.terms(rows, values, scales)]
        return functools.reduce(operator.add, parts)
    codes, by_group, kind, terms = found
    first = packed_matmul(rows.reshape(-1, rows.shape[-1]), codes, by_group, kind)
    first = first.reshape(*x.shape[: x.ndim - contract], *form.shape(values.shape)[contract:])
    return functools.reduce(operator.add, [first, *(_wide_dot(part, weight) for part, weight in terms)])


def _native_matmul(form: Any, contract: int, x: Array, values: Array, scales: Array, layer: Any) -> Array | None:
    """Matmul with one layer of a stack by the kernel for CPUs, in float32; None where it does not take it, or where
    there are so many rows that XLA's matmul with the dense weight is as fast.
    """
    dense = form.shape(values.shape[1:])
    inputs, columns = math.prod(dense[:contract]), math.prod(dense[contract:])
    if x.size > inputs * MOST_ROWS or columns < FEWEST or not isinstance(form, NativeFormat):
        return None
    kernel = form.native_form(inputs, scales.shape[1:], contract)
    if kernel is None or not _takes(x, scales, kernel):
        return None
    layers, stored = values.shape[0], kernel.stored

    def multiply(x: Array, values: Array, scales: Array, layer: Array) -> Array:
        parameters = scales.reshape(layers, stored, -1, columns)
        return stored_matmul(x, values.reshape(layers, -1, columns), parameters, kernel, layer)

    def matrix(values: Array, scales: Array, layer: Array) -> Array:
        return form.unpack(_at(values, layer), _at(scales, layer), x.dtype).reshape(inputs, columns)

    y = _by_kernel(multiply, matrix, x.reshape(-1, inputs), values, scales, jnp.asarray(layer, jnp.int32))
    return y.reshape(*x.shape[: x.ndim - contract], *dense[contract:])


def _takes(x: Array, scales: Array, kernel: NativeForm) -> bool:
    """Whether the kernel for CPUs is chosen for these arrays."""
    there = target_device().platform == "cpu" and not unsupported(x.dtype, scales.dtype, kernel)
    return there and may_be_default("packed_matmul", "native")


def _by_kernel(
    multiply: Callable[..., Array], matrix: Callable[..., Array], x: Float[Array, "M K"], *arrays: Array
) -> Float[Array, "M N"]:
    """``multiply(x, *arrays)``, a kernel, with the gradient of ``x @ matrix(*arrays)`` for x."""

    @jax.custom_vjp
    def run(x: Array, *arrays: Array) -> Array:
        return manual_on_one_device(multiply)(x, *arrays)

    def backward(arrays: tuple[Array, ...], dy: Array) -> tuple[Array | None, ...]:
        return (dy @ matrix(*arrays).T).astype(x.dtype), *(None for _ in arrays)

    run.defvjp(lambda x, *arrays: (run(x, *arrays), arrays), backward)
    axes = varying_axes(x, *arrays)
    return run(*(vary_over(a, axes) for a in (x, *arrays)))


def _rows(table: Array, ids: Int[Array, "B S"], out: LogicalAxes) -> Array:
    """Rows of a table of bytes or scales.

    On TPUs bytes lie in tiles of ``BYTE_ROWS`` rows, which a lookup of single rows makes the compiler lay out anew: it
    copies the table in every decode step. Of few tokens, whole tiles are looked up, and a row of each is taken.
    """
    tall = table.shape[0]
    few = ids.size <= FEW_LOOKUPS and tall % BYTE_ROWS == 0 and table.dtype.itemsize == 1
    if target_device().platform != "tpu" or not few:
        return sharding.take(table, ids, out=out)
    tiles = table.reshape(tall // BYTE_ROWS, BYTE_ROWS, *table.shape[1:])
    found = sharding.take(tiles, ids // BYTE_ROWS, out=(*out[: ids.ndim], None, *out[ids.ndim :]))
    own = jnp.arange(BYTE_ROWS) == (ids % BYTE_ROWS)[..., None]
    return jnp.sum(jnp.where(own[..., None], found, 0), axis=ids.ndim, dtype=table.dtype)


def _row_matmul(form: RowFormat, x: Float[Array, "T D"], values: Array, scales: Array) -> Float[Array, "T V"]:
    """Matmul of one device's hidden states and rows, in at least float32.

    Some rows at a time: dequantised rows that are too many for caches would be written to memory, in 8 times the time
    of a CPU's matmul with packed ones.
    """

    kernel = form.native_row_form(x.shape[1], scales.shape)
    if kernel is not None and x.shape[0] <= MOST_ROWS and _takes(x, scales, kernel):
        return _by_kernel(
            lambda x, values, scales: stored_row_matmul(x, values, scales, kernel),
            lambda values, scales: form.unpack(values, scales, x.dtype).T,
            x, values, scales,
        )  # fmt: skip

    # XLA fuses the rows into the matmul of one hidden state alone; with more it would write them dequantised.
    few = 1 < x.shape[0] <= GPU_ROWS and target_device().platform == "gpu"
    codes = form.row_codes(x.shape[1], scales.shape) if few else None
    if codes is not None and may_be_default("packed_matmul", "pallas_gpu"):
        return packed_matmul(x, values, scales.reshape(values.shape[0], -1), codes)

    def some(values: Array, scales: Array) -> Float[Array, "T n"]:
        return functools.reduce(operator.add, (_wide_dot(part, w.T) for part, w in form.row_terms(x, values, scales)))

    size, inputs = form.shape(values.shape)
    tile = max(1, TILE_BYTES[target_device().platform] // (at_least_f32(x.dtype).itemsize * inputs))
    if size <= tile:
        return some(values, scales)
    count, rest = divmod(size, tile)

    def at(i: Array) -> Float[Array, "T n"]:
        # Sliced within the loop: outside, the slice of all whole tiles would be a copy of the matrix. Of a product the
        # compiler knows that it is a multiple of the tile, so that TPUs need no other layout to slice at it.
        return some(*(jax.lax.dynamic_slice_in_dim(a, i * np.uint32(tile), tile) for a in (values, scales)))

    tiles = jnp.moveaxis(jax.lax.map(at, jnp.arange(count, dtype=jnp.uint32)), 0, 1).reshape(x.shape[0], -1)
    if not rest:
        return tiles
    return jnp.concatenate([tiles, some(values[-rest:], scales[-rest:])], axis=1)


def _wide_dot(x: Array, w: Array) -> Array:
    """Matmul ``x[..., I] @ w[I, *out]`` in at least float32, because terms are summed before they are rounded."""
    y = jnp.matmul(x.reshape(-1, x.shape[-1]), w.reshape(w.shape[0], -1), preferred_element_type=at_least_f32(x.dtype))
    return y.reshape(*x.shape[:-1], *w.shape[1:])


def scale_spec(form: WeightFormat, spec: Sequence[Any]) -> jax.P:
    """Partition spec of the scales of a weight with this spec, one part for each dimension."""
    names = form.scale_axes(tuple(str(dim) for dim in range(len(spec))))
    return jax.P(*(None if name is None else spec[int(name)] for name in names))


def axes_of_arrays(weight: Any, axes: LogicalAxes) -> list[LogicalAxes]:
    """Logical axes of the arrays that a weight with these consists of: itself, or packed values and scales, or more."""
    return weight.array_axes(axes) if hasattr(weight, "array_axes") else [axes]


def batch_dependent_formats(params: Any) -> list[str]:
    """Formats in a parameter tree with which a token's result depends on the other tokens of the call."""
    forms = {node.format for node in jax.tree.leaves(params, is_leaf=is_packed) if is_packed(node)}
    return sorted(str(form) for form in forms if isinstance(form, ActivationFormat) and form.depends_on_batch)


def native_vectors(params: Any) -> str:
    """Instructions of the kernel for CPUs that programs with these parameters may call; empty where they call none.

    Stored programs depend on it, and can be loaded after this call alone: it registers the kernel.
    """
    there = target_device().platform == "cpu" and has_packed(params) and may_be_default("packed_matmul", "native")
    return vectors() if there else ""


def is_packed(x: Any) -> bool:
    """Whether a node of a parameter tree is a packed weight: for ``is_leaf`` of ``jax.tree`` functions."""
    return isinstance(x, PackedWeight)


def has_packed(params: Any) -> bool:
    """Whether a parameter tree contains packed weights; those whose arrays were left out (None) do not count."""
    return any(is_packed(node) and jax.tree.leaves(node) for node in jax.tree.leaves(params, is_leaf=is_packed))
