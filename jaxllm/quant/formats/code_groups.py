"""Codes in 2 to 8 bits, with parameters (a scale, and maybe a zero point) for each group of inputs of each column.

A group is of consecutive elements along the dimensions that a matmul sums over, taken as one dimension of I inputs. The
last group may be shorter. Codes are packed along the last of these dimensions, the first in the lowest bits: ``n``
codes that share bytes are a tuple. Lane k of a weight has the k-th element of every tuple.

Legend: I inputs, G groups, O outputs, P stored parameters of a group (scale, zero point).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from jaxllm.quant.codebooks import CodebookGrid
from jaxllm.quant.grids import CentredGrid, Grid, GridParams, IntGrid, MinimumGrid
from pallas_kernels.packed_matmul import BITS, PackedCodes
from pallas_kernels.packed_matmul.native import FEWEST, NativeForm, NativeKind
from sharding import LogicalAxes

WORDS = {bits: (8 // math.gcd(bits, 8), bits // math.gcd(bits, 8)) for bits in range(2, 9)}
"""Codes that are packed together, and the bytes that they take, by bits of a code."""


@dataclass(frozen=True)
class CodeGroups:
    """Codes with parameters of groups, one array [..., P, G, *out] of those that the grid stores.

    Attributes:
        grid: codes and their values.
        group: elements that share parameters; None: all inputs of a column.
        axis: last dimension that a matmul sums over, counted from the end.
        contract: number of dimensions that it sums over.
    """

    grid: Grid
    group: int | None = 128
    axis: int = -2
    contract: int = 1

    def __str__(self) -> str:
        return f"{self.grid.name}, {'one group' if self.group is None else f'groups of {self.group}'}"

    def shape(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the dense weight."""
        codes, size = WORDS[self.grid.bits]
        axis = self.axis % len(values)
        return (*values[:axis], values[axis] // size * codes, *values[axis + 1 :])

    def pack(self, weight: Float[Array, "..."]) -> tuple[UInt8[Array, "..."], Float[Array, "..."]]:
        """Codes and parameters, rounded to the nearest.

        Raises:
            ValueError: the last input dimension cannot be packed into whole bytes.
        """
        flat = self.flatten(weight.astype(jnp.float32))
        params = self.fit(flat)
        codes = self.grid.encode(flat, self.spread(params, flat.shape[self.axis]))
        return self.pack_codes(codes, weight.shape), self.join(params)

    def unpack(self, values: UInt8[Array, "..."], scales: Array, dtype: DTypeLike) -> Float[Array, "..."]:
        """Dense weight: the value of each code in ``dtype`` but at least float32, rounded to ``dtype``."""
        lanes = self._lanes(self.flatten(values), self.params(scales, dtype), self.grid)
        dense = jnp.stack(lanes, axis=self.axis % lanes[0].ndim + 1)
        return dense.reshape(self.shape(values.shape)).astype(dtype)

    def terms(
        self, x: Float[Array, "... I"], values: UInt8[Array, "..."], scales: Array
    ) -> list[tuple[Float[Array, "..."], Float[Array, "..."]]]:
        """The matmul as a sum over lanes, whose weights are elementwise in the codes, so that XLA fuses them into it.

        With zero points or minima, a term for the sums of groups of inputs, times the values of the
        middle code: XLA:CPU fuses a scale, but not both.
        """
        lanes, offset = self._lanes_and_offset(values, scales, x.dtype)
        outs = lanes[0].shape[self.axis % lanes[0].ndim + 1 :]
        terms = [(x[..., k :: len(lanes)], lane.reshape(-1, *outs).astype(x.dtype)) for k, lane in enumerate(lanes)]
        return [*terms, *self._offset_terms(x, offset, lanes[0].shape[self.axis] * len(lanes))]

    def row_terms(
        self, x: Float[Array, "T I"], values: UInt8[Array, "V B"], scales: Array
    ) -> list[tuple[Float[Array, "..."], Float[Array, "..."]]]:
        """``terms`` of an output matrix [V, I], whose axis is the last; weights are [V, inputs]."""
        lanes, offset = self._lanes_and_offset(values, scales, x.dtype)
        terms = [(x[..., k :: len(lanes)], lane.astype(x.dtype)) for k, lane in enumerate(lanes)]
        if offset is None:
            return terms
        return [*terms, (self._group_sums(x, offset.shape[-1]), offset.astype(x.dtype))]

    def _lanes_and_offset(
        self, values: UInt8[Array, "..."], scales: Array, dtype: DTypeLike
    ) -> tuple[list[Array], Array | None]:
        """Values of all lanes, around 0 where there are offsets, and the values of the middle codes."""
        params = self.params(scales, dtype)
        offset = self.grid.offset(params)
        plain = self.grid if offset is None else CentredGrid(self.grid.bits)
        return self._lanes(self.flatten(values), params, plain), offset

    def kernel_terms(
        self, x: Float[Array, "... I"], values: UInt8[Array, "..."], scales: Array
    ) -> tuple[UInt8[Array, "B N"], Float[Array, "G N"], PackedCodes, list[tuple[Array, Array]]] | None:
        """Operands of ``packed_matmul`` (bytes, scales and what codes stand for), and the matmuls to add.

        None where codes have 5 or 7 bits, groups are shorter or cut a tuple, or codes are no few levels times a scale.
        Dimensions of inputs that precede those of the format (heads) have groups of their own.
        """
        bits, flat = self.grid.bits, self.flatten(values)
        axis, lanes = self.axis % flat.ndim, WORDS[self.grid.bits][0]
        params = self.params(scales, x.dtype)
        parts, groups = math.prod(flat.shape[:axis]), params.scale.shape[axis]
        inputs = x.shape[-1] // parts
        levels = self.grid.levels if isinstance(self.grid, CodebookGrid) else None
        size = self.stored_sizes(inputs, groups)[0]
        if bits not in BITS or size * groups != inputs or size % lanes or (levels and bits == 8):
            return None
        codes, by_group = (a.reshape(math.prod(a.shape[: axis + 1]), -1) for a in (flat, params.scale))
        return codes, by_group, PackedCodes(bits, levels), self._offset_terms(x, self.grid.offset(params), inputs)

    def native_form(self, inputs: int, scales: tuple[int, ...], contract: int) -> NativeForm | None:
        """Codes and parameters of one layer as the kernel for CPUs reads them, where they are stored.

        None where it has no such codes, or groups are shorter or cut a tuple of codes.

        Args:
            inputs: of the matmul, over ``contract`` dimensions.
            scales: shape of the parameters.
        """
        bits, grid = self.grid.bits, self.grid
        first, axis = contract - self.contract, len(scales) + self.axis
        lead, groups = math.prod(scales[:first]), self._groups(scales[axis])
        levels = grid.levels if isinstance(grid, CodebookGrid) else None
        size = inputs // lead // groups
        whole = size * groups * lead == inputs and size % WORDS[bits][0] == 0 and (self.group or size) == size
        if axis != first + 1 or not whole or bits == 7 or (levels and bits > 4) or (lead > 1 < scales[first]):
            return None
        kind = "minimum" if isinstance(grid, MinimumGrid) else "zero" if grid.stored > 1 else "scale"
        return NativeForm(bits, lead * groups, self._native_kind(kind), levels, scales[first])

    def native_row_form(self, inputs: int, scales: tuple[int, ...]) -> NativeForm | None:
        """The same of an output matrix, whose axis is the last: integers of 8 bits in groups of whole vectors."""
        groups = scales[-1]
        plain = isinstance(self.grid, IntGrid) and self.grid.bits == 8 and self.grid.stored == 1
        whole = (
            self.axis == -1 and inputs % (groups * FEWEST) == 0 and (self.group or inputs // groups) * groups == inputs
        )
        return NativeForm(8, groups) if plain and whole and type(self) is CodeGroups else None

    def row_codes(self, inputs: int, scales: tuple[int, ...]) -> PackedCodes | None:
        """Codes of an output matrix, whose axis is the last, as kernels for GPUs read them: integers times one scale,
        of all inputs or of groups of a multiple of 16 tuples.
        """
        groups, bits = scales[-1], self.grid.bits
        plain = isinstance(self.grid, IntGrid) and self.grid.stored == 1 and bits in BITS
        size = inputs // groups // WORDS[bits][0]
        whole = size * groups * WORDS[bits][0] == inputs and (groups == 1 or size % 16 == 0)
        if not (plain and whole and self.axis == -1 and type(self) is CodeGroups):
            return None
        return PackedCodes(bits, wide=True, by_row=True)

    def _groups(self, stored: int) -> int:
        """Groups of so many stored parameters."""
        return stored

    def _native_kind(self, kind: NativeKind) -> NativeKind:
        """Kind of stored parameters that a grid has."""
        return kind

    def _offset_terms(self, x: Array, offset: Array | None, inputs: int) -> list[tuple[Array, Array]]:
        """Sums of groups of inputs, and the values of the middle codes; none where these are 0."""
        if offset is None:
            return []
        sums = self._group_sums(x.reshape(*x.shape[:-1], -1, inputs), offset.shape[self.axis])
        outs = offset.shape[self.axis % offset.ndim + 1 :]
        return [(sums.reshape(*x.shape[:-1], -1), offset.reshape(-1, *outs).astype(x.dtype))]

    def _group_sums(self, x: Float[Array, "... I"], stored: int) -> Float[Array, "... G"]:
        """Sums of the inputs of each of the ``stored`` groups."""
        size, groups = self.stored_sizes(x.shape[-1], stored)
        padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size * groups - x.shape[-1])])
        return padded.reshape(*x.shape[:-1], groups, size).sum(-1)

    def scale_axes(self, axes: LogicalAxes) -> LogicalAxes:
        """Logical axes of the parameters: those of the weight, with one for all inputs, which is split like the first
        of them.
        """
        first, last = self._span(len(axes))
        return (*axes[:first], None, axes[first], *axes[last + 1 :])

    def flatten(self, x: Array) -> Array:
        """``x[..., *in, *out]`` with one dimension for all inputs."""
        first, last = self._span(x.ndim)
        return x.reshape(*x.shape[:first], -1, *x.shape[last + 1 :])

    def fit(self, flat: Float[Array, "... I *out"]) -> GridParams:
        """Parameters of every group, [..., G, *out]."""
        axis = self.axis % flat.ndim
        x = jnp.moveaxis(flat, axis, 0)
        size, groups = self.sizes(x.shape[0])
        # Repeating the last element of a short group changes neither its smallest nor its largest.
        x = jnp.concatenate([x, jnp.broadcast_to(x[-1:], (size * groups - x.shape[0], *x.shape[1:]))])
        x = x.reshape(groups, size, -1)
        params = self.grid.fit(x)
        back = lambda y: jnp.moveaxis(y.reshape(groups, *flat.shape[:axis], *flat.shape[axis + 1 :]), 0, axis)  # noqa: E731
        return GridParams(back(params.scale), back(params.zero))

    def sizes(self, inputs: int) -> tuple[int, int]:
        """(size of a group, number of groups) for so many inputs."""
        size = self.group or inputs
        return size, -(-inputs // size)

    def stored_sizes(self, inputs: int, stored: int) -> tuple[int, int]:
        """``sizes`` of a weight with so many ``stored`` groups: one for each shard that was packed by itself, where all
        inputs share a scale.

        Raises:
            ValueError: there are not as many groups as the inputs have.
        """
        if self.group is None and stored and inputs % stored == 0:
            return inputs // stored, stored
        size, groups = self.sizes(inputs)
        if groups != stored:
            raise ValueError(
                f"{inputs} inputs in groups of {size} have {groups} scales, not {stored}: the mesh "
                "splits a group; split the inputs over fewer devices."
            )
        return size, groups

    def spread(self, params: GridParams, inputs: int) -> GridParams:
        """Parameters of every input."""
        return self._at(params, jnp.arange(inputs) // self.sizes(inputs)[0])

    def join(self, params: GridParams) -> Float[Array, "..."]:
        """The stored array of parameters."""
        return jnp.stack(params[: self.grid.stored], axis=self.axis % params.scale.ndim)

    def params(self, scales: Float[Array, "..."], dtype: DTypeLike) -> GridParams:
        """Parameters of groups, in ``dtype`` but at least float32, from the stored array."""
        wide = scales.astype(functools.reduce(jnp.promote_types, (scales.dtype, jnp.float32), dtype))
        return self.grid.params(
            [jax.lax.index_in_dim(wide, i, self.axis - 1, keepdims=False) for i in range(self.grid.stored)]
        )

    def pack_codes(self, codes: UInt8[Array, "..."], shape: tuple[int, ...]) -> UInt8[Array, "..."]:
        """Packed codes of a weight of ``shape``.

        Raises:
            ValueError: the last input dimension cannot be packed into whole bytes.
        """
        bits, axis = self.grid.bits, self.axis % len(shape)
        count, size = WORDS[bits]
        if shape[axis] % count:
            raise ValueError(
                f"{self.grid.name}: {count} codes share bytes, and {shape[axis]} is no multiple of {count}."
            )
        x = codes.reshape(*shape[:axis], -1, count, *shape[axis + 1 :]).astype(jnp.int32)
        parts = [jnp.zeros_like(jnp.take(x, 0, axis=axis + 1))] * size
        for k in range(count):
            byte, shift = divmod(bits * k, 8)
            code = jnp.take(x, k, axis=axis + 1)
            parts[byte] |= code << shift & 255
            if shift + bits > 8:
                parts[byte + 1] |= code >> 8 - shift
        packed = jnp.stack(parts, axis=axis + 1)
        return packed.reshape(*shape[:axis], -1, *shape[axis + 1 :]).astype(jnp.uint8)

    def unpack_codes(self, values: UInt8[Array, "..."]) -> UInt8[Array, "..."]:
        """Codes in the shape of the dense weight."""
        flat = self.flatten(values)
        lanes = [self.lane_codes(flat, k) for k in range(WORDS[self.grid.bits][0])]
        return jnp.stack(lanes, axis=self.axis % flat.ndim + 1).reshape(self.shape(values.shape))

    def lane_codes(self, flat: UInt8[Array, "..."], k: int) -> UInt8[Array, "..."]:
        """Codes of lane k of packed values with one dimension of inputs."""
        bits, axis = self.grid.bits, self.axis % flat.ndim
        size = WORDS[bits][1]
        byte, shift = divmod(bits * k, 8)
        if size == 1:
            return flat if bits == 8 else flat >> shift & 2**bits - 1
        tuples = flat.reshape(*flat.shape[:axis], -1, size, *flat.shape[axis + 1 :])
        code = jax.lax.index_in_dim(tuples, byte, axis + 1, keepdims=False) >> shift
        if shift + bits > 8:
            code |= jax.lax.index_in_dim(tuples, byte + 1, axis + 1, keepdims=False) << 8 - shift
        return code & 2**bits - 1

    def nbytes(self, shape: tuple[int, ...], width: int = 4) -> int:
        """Bytes of a packed weight of ``shape``, whose parameters have ``width`` bytes each."""
        count, size = WORDS[self.grid.bits]
        first, last = self._span(len(shape))
        inputs = math.prod(shape[first : last + 1])
        return math.prod(shape) * size // count + self.grid.stored * width * self.sizes(inputs)[1] * (
            math.prod(shape) // inputs
        )

    def _lanes(self, flat: UInt8[Array, "..."], params: GridParams, grid: Grid | CentredGrid) -> list[Array]:
        """Values of all lanes, [..., I / n, *out] each."""
        count, bytes_ = WORDS[self.grid.bits]
        axis = self.axis % flat.ndim
        inputs = flat.shape[axis] // bytes_ * count
        size, groups = self.stored_sizes(inputs, params.scale.shape[axis])
        lanes = [self.lane_codes(flat, k) for k in range(count)]
        if size % count or inputs % size:
            places = (jnp.arange(k, inputs, count) // size for k in range(count))
            return [grid.decode(codes, self._at(params, place)) for codes, place in zip(lanes, places, strict=True)]
        rows = (*flat.shape[:axis], groups, size // count, *flat.shape[axis + 1 :])
        own = GridParams(*(jnp.expand_dims(x, axis + 1) for x in params))
        return [grid.decode(codes.reshape(rows), own).reshape(codes.shape) for codes in lanes]

    def _at(self, params: GridParams, place: Array) -> GridParams:
        """Parameters of the groups ``place``."""
        return GridParams(*(jnp.take(x, place, axis=self.axis) for x in params))

    def _span(self, dims: int) -> tuple[int, int]:
        """First and last dimension that a matmul sums over."""
        last = self.axis % dims
        return last - self.contract + 1, last
