"""Slot layout: where the values of an encoded slot are, by which XLA and each kernel decode a block of slots on chip.

A format that has a layout gives three functions of arrays: ``numbers`` of stored elements, ``factors`` of scales, and
``values`` of both (``KVFormat``). What differs between platforms is how numbers and factors get to their places, and
that is here: XLA joins and repeats arrays; a TPU rotates the lanes of registers and selects; a GPU loads from the
addresses that a piece of a slot has. So a kernel knows no format, and a format knows no kernel.

Legend: C slots of a page, M stored elements of a slot, W values, Z words of scales of a slot, J pages, S slots of a
tile, H channels, X scales of a piece.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped


class ValueRun(NamedTuple):
    """Consecutive values of a slot in consecutive stored elements.

    Attributes:
        start, size: first value, and number of values.
        element: stored element of the first value.
        place: first bit of the values in their elements.
    """

    start: int
    size: int
    element: int
    place: int = 0


class ScaleGroups(NamedTuple):
    """Consecutive groups of values, each with a scale of its own for every slot.

    Attributes:
        start: first value.
        group: values of a group.
        count: number of groups.
        row: word of the slot's scales that has the first group's.
    """

    start: int
    group: int
    count: int
    row: int

    @property
    def stop(self) -> int:
        """The value behind the last."""
        return self.start + self.group * self.count


class SlotLayout(NamedTuple):
    """Layout of an encoded slot: where its values are; runs and groups are in the order of the values.

    Attributes:
        runs: all values.
        groups: those with scales in the slot.
        per_word: scales in a word.
        channels: (first value, number of values) of those with scales in the page, one for each channel.
    """

    runs: tuple[ValueRun, ...]
    groups: tuple[ScaleGroups, ...] = ()
    per_word: int = 1
    channels: tuple[int, int] | None = None

    @property
    def words(self) -> int:
        """Words of scales of a slot (Z)."""
        return sum(-(-one.count // self.per_word) for one in self.groups)


Factors = tuple[Array, ...]
"""What numbers are multiplied by and what is added to them, as the format has it."""


@runtime_checkable
class SlotDecoder(Protocol):
    """The functions of a format that has a layout: element by element, traced inside kernels too."""

    def numbers(self, elements: Array, place: int, dtype: DTypeLike) -> Array:
        """Numbers before scaling, of stored elements that hold them from bit ``place`` on; bytes may come as int32."""
        ...

    def factors(self, words: Array, place: Any, dtype: DTypeLike) -> Factors:
        """Factors of words of scales; ``place`` of the scale in its word, an int or Int[Array, "..."]."""
        ...

    def values(self, numbers: Array, factors: Factors) -> Array:
        """Values of numbers."""
        ...


def runs_of_parts(parts: tuple[int, ...], bits: int) -> tuple[ValueRun, ...]:
    """Runs of parts that ``pack_bits`` has packed into bytes, one behind the other."""
    per, found, start, element = 8 // bits, list[ValueRun](), 0, 0
    for part in parts:
        size = part // per
        found += [ValueRun(start + i * size, size, element, i * bits) for i in range(per)]
        start, element = start + part, element + size
    return tuple(found)


def groups_of_parts(sizes: tuple[tuple[int, int], ...], per_word: int = 1, start: int = 0) -> tuple[ScaleGroups, ...]:
    """Scale groups of consecutive parts, (values, values of a group) each; the words of a part begin anew."""
    found, row = list[ScaleGroups](), 0
    for size, group in sizes:
        found.append(ScaleGroups(start, group, size // group, row))
        start, row = start + size, row + -(-size // group // per_word)
    return tuple(found)


def unpack_slots(
    form: SlotDecoder,
    layout: SlotLayout,
    data: Shaped[Array, "*any C M"],
    scales: Shaped[Array, "*any Z C"] | None,
    channels: Int[Array, "*any 1 H"] | None,
    dtype: DTypeLike,
) -> Float[Array, "*any C W"]:
    """Values of slots in plain JAX; elements behind the last run are padding."""
    factors = [_group_factors(form, layout, one, scales, dtype) for one in layout.groups]
    of_channels: Factors = ()
    first, count = (0, 0) if layout.channels is None else layout.channels
    if count:
        assert channels is not None
        of_channels = form.factors(channels[..., :count], 0, dtype)
    found = list[Array]()
    for run in layout.runs:
        elements = data[..., run.element : run.element + run.size]
        numbers, at, stop = form.numbers(elements, run.place, dtype), run.start, run.start + run.size
        while at < stop:
            if first <= at < first + count:
                end = min(stop, first + count)
                own = tuple(x[..., at - first : end - first] for x in of_channels)
                found.append(form.values(numbers[..., at - run.start : end - run.start], own))
            else:
                index = next(i for i, one in enumerate(layout.groups) if one.start <= at < one.stop)
                one, end = layout.groups[index], min(stop, layout.groups[index].stop)
                group, inside = divmod(at - one.start, one.group)
                if inside or end - at < one.group:  # a part of a group
                    end = min(end, at - inside + one.group)
                    many, size = 1, end - at
                else:
                    many, size = (end - at) // one.group, one.group
                    end = at + many * size
                some = numbers[..., at - run.start : end - run.start].reshape(*numbers.shape[:-1], many, size)
                own = tuple(x[..., group : group + many, None] for x in factors[index])
                found.append(form.values(some, own).reshape(*numbers.shape[:-1], many * size))
            at = end
    return found[0] if len(found) == 1 else jnp.concatenate(found, axis=-1)


def _group_factors(
    form: SlotDecoder,
    layout: SlotLayout,
    one: ScaleGroups,
    scales: Shaped[Array, "*any Z C"] | None,
    dtype: DTypeLike,
) -> Factors:
    """Factors of the groups of every slot, [*any, C, count]."""
    assert scales is not None
    words = -(-one.count // layout.per_word)
    held = jnp.swapaxes(scales[..., one.row : one.row + words, :], -1, -2)  # *any C Z
    if layout.per_word > 1:
        held = jnp.repeat(held, layout.per_word, axis=-1)[..., : one.count]
    return form.factors(held, jnp.arange(one.count, dtype=jnp.int32) % layout.per_word, dtype)


def decode_lanes(
    form: SlotDecoder,
    layout: SlotLayout,
    tile: Shaped[Array, "J C M"],
    words: Callable[[int], Array],
    channels: Int[Array, "J 1 H"] | None,
    lanes: int,
    width: int,
) -> Float[Array, "J C W"]:
    """Values of a tile of slots inside a TPU kernel, in float32, up to a multiple of the lanes of a register.

    Each register of ``lanes`` values is made of the registers that hold their elements, rotated to their lanes. Values
    behind the last run are anything finite.

    Args:
        form, layout: decoder and layout.
        tile: stored elements; M is a multiple of ``lanes``.
        words: words of scales of every slot by their row, [J, C].
        channels: words of the pages' channels, H a multiple of ``lanes``.
        lanes: lanes of a register.
        width: W, a multiple of it.
    """
    found = [_lane_block(form, layout, tile, words, channels, lanes, first) for first in range(0, width, lanes)]
    return found[0] if len(found) == 1 else jnp.concatenate(found, axis=-1)


def _lane_block(
    form: SlotDecoder,
    layout: SlotLayout,
    tile: Array,
    words: Callable[[int], Array],
    channels: Array | None,
    lanes: int,
    first: int,
) -> Array:
    """Values ``first`` to ``first + lanes - 1`` of slots."""
    lane, stop = first + jax.lax.broadcasted_iota(jnp.int32, (1, 1, lanes), 2), first + lanes
    numbers: Array | None = None

    def chosen(start: int, new: Array, old: Array | None) -> Array:
        """Lanes of ``new`` from value ``start`` on, and those of ``old`` before it."""
        return new if old is None else jnp.where(lane >= start, new, old)

    for run in layout.runs:
        at, behind = max(first, run.start), min(stop, run.start + run.size)
        while at < behind:
            element = run.element + at - run.start
            source = element // lanes
            elements = tile[..., source * lanes : (source + 1) * lanes]
            shift = (at - first - element) % lanes
            elements = _wide(elements)
            elements = pltpu.roll(elements, shift, axis=2) if shift else elements
            numbers = chosen(at, form.numbers(elements, run.place, jnp.float32), numbers)
            at += min(behind - at, (source + 1) * lanes - element)
    if numbers is None:
        return jnp.zeros((*tile.shape[:2], lanes), jnp.float32)
    pieces = list[tuple[int, Factors]]()
    for one in layout.groups:
        for i in range(one.count):
            start = one.start + i * one.group
            if start < stop and start + one.group > first:
                row, place = one.row + i // layout.per_word, i % layout.per_word
                pieces.append((start, tuple(x[..., None] for x in form.factors(words(row), place, jnp.float32))))
    if layout.channels is not None and layout.channels[0] < stop and sum(layout.channels) > first:
        assert channels is not None
        pieces.append(
            (layout.channels[0], form.factors(_channel_block(channels, layout, lanes, first), 0, jnp.float32))
        )
    factors: Factors | None = None
    for start, own in sorted(pieces, key=lambda piece: piece[0]):
        factors = own if factors is None else tuple(chosen(start, a, b) for a, b in zip(own, factors, strict=True))
    return form.values(numbers, () if factors is None else factors)


def _channel_block(channels: Array, layout: SlotLayout, lanes: int, first: int) -> Array:
    """Words of the channels in the lanes of their values."""
    assert layout.channels is not None
    start, size = layout.channels
    found: Array | None = None
    at, behind = max(first, start), min(first + lanes, start + size)
    while at < behind:
        source = (at - start) // lanes
        words = channels[..., source * lanes : (source + 1) * lanes]
        shift = (at - first - (at - start)) % lanes
        words = pltpu.roll(words, shift, axis=2) if shift else words
        lane = first + jax.lax.broadcasted_iota(jnp.int32, (1, 1, lanes), 2)
        found = words if found is None else jnp.where(lane >= at, words, found)
        at += min(behind - at, (source + 1) * lanes - (at - start))
    assert found is not None
    return found


class Piece(NamedTuple):
    """A power of two of consecutive values of a slot, in consecutive elements; as ``ValueRun``.

    They are in one scale group, or they are whole groups.
    """

    start: int
    size: int
    element: int
    place: int


def pieces_of(layout: SlotLayout, start: int, size: int) -> list[Piece]:
    """Pieces that add up to consecutive values, each as large as it can be."""
    found, at = list[Piece](), start
    while at < start + size:
        run = next(one for one in layout.runs if one.start <= at < one.start + one.size)
        most = min(start + size, run.start + run.size) - at
        count = 1 << most.bit_length() - 1
        while not _decodes(layout, at, count):
            count //= 2
        found.append(Piece(at, count, run.element + at - run.start, run.place))
        at += count
    return found


def _decodes(layout: SlotLayout, start: int, size: int) -> bool:
    """Whether values are in one group, in whole groups, or in channels."""
    stop = start + size
    for one in layout.groups:
        if start < one.stop and stop > one.start:
            inside = one.start <= start and stop <= one.stop
            first, last = (start - one.start) // one.group, (stop - 1 - one.start) // one.group
            whole = (start - one.start) % one.group == 0 and size % one.group == 0
            return inside and (first == last or whole)
    if layout.channels is not None and start < sum(layout.channels) and stop > layout.channels[0]:
        return layout.channels[0] <= start and stop <= sum(layout.channels)
    return True


def piece_values(
    form: SlotDecoder,
    layout: SlotLayout,
    piece: Piece,
    elements: Shaped[Array, "S size"],
    words: Callable[[Any], Array],
    channels: Callable[[Int[Array, " size"]], Array],
    dtype: DTypeLike,
) -> Float[Array, "S size"]:
    """Values of a piece of slots inside a GPU kernel, in ``dtype``.

    Args:
        form, layout, piece: decoder, layout and piece.
        elements: stored elements of the piece.
        words: loads words of scales of every slot: of a row, [S], or of Int[Array, "X"] rows, [S, X].
        channels: loads words of these channels of every slot's page, [S, size].
        dtype: dtype of the result; float32 or less.
    """
    numbers = form.numbers(_wide(elements), piece.place, jnp.float32)
    for one in layout.groups:
        if one.start <= piece.start < one.stop:
            first, count = (piece.start - one.start) // one.group, max(1, piece.size // one.group)
            if count == 1:
                own = form.factors(words(one.row + first // layout.per_word), first % layout.per_word, jnp.float32)
                factors = tuple(x[:, None] for x in own)
            else:
                each = first + jax.lax.iota(jnp.int32, count)
                held = words(one.row + each // layout.per_word)
                own = form.factors(held, (each % layout.per_word)[None], jnp.float32)
                factors = tuple(_repeated(x, one.group) for x in own)
            return form.values(numbers, factors).astype(dtype)
    if layout.channels is not None and layout.channels[0] <= piece.start < sum(layout.channels):
        own = channels(piece.start - layout.channels[0] + jax.lax.iota(jnp.int32, piece.size))
        return form.values(numbers, form.factors(own, 0, jnp.float32)).astype(dtype)
    return form.values(numbers, ()).astype(dtype)


def _wide(elements: Shaped[Array, "*any"]) -> Shaped[Array, "*any"]:
    """Bytes as int32: kernels shift no bits of bytes, and rotate no lanes of them."""
    return elements.astype(jnp.int32) if elements.dtype == jnp.uint8 else elements


def _repeated(x: Float[Array, "S X"], times: int) -> Float[Array, "S size"]:
    spread = jnp.broadcast_to(x[:, :, None], (*x.shape, times))
    return spread.reshape(x.shape[0], x.shape[1] * times)


def half_floats(bits: Int[Array, "*any"]) -> Float[Array, "*any"]:
    """float32 numbers of the lower 16 bits of integers, which are those of float16: TPUs have no such dtype.

    Exact, subnormal numbers and those that are not finite included.
    """
    sign, exponent, fraction = bits & 0x8000, (bits >> 10) & 31, bits & 1023
    small = fraction.astype(jnp.float32) * 2.0**-24
    exponent = jnp.where(exponent == 31, 255, exponent + 112)
    normal = jax.lax.bitcast_convert_type((exponent << 23) | (fraction << 13), jnp.float32)
    size = jnp.where((bits >> 10) & 31 == 0, small, normal)
    return jnp.where(sign != 0, -size, size)
