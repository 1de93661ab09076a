"""Settings with a value for each run of layers, such as ``remat = "none=8,full=24"``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

ByLayers = tuple[tuple[str, int | None], ...]
"""Values in the order of layers, each with its number of layers; None: all remaining ones."""


def parse_by_layers(text: str) -> ByLayers:
    """Values of a text such as "none=8,full=24", in the order of layers.

    Raises:
        ValueError: a count is not a positive number, or one that is not the last is missing. The message is the end of
            a sentence about the setting.
    """
    found: list[tuple[str, int | None]] = []
    for part in text.split(","):
        value, equals, count = part.strip().partition("=")
        if equals and not (count.isdecimal() and int(count)):
            raise ValueError(f"{part.strip()!r} has no number of layers")
        found.append((value, int(count) if equals else None))
    if any(count is None for _, count in found[:-1]):
        raise ValueError("only the last value may omit its number of layers")
    return tuple(found)


def split_by_segment(values: ByLayers, segments: Sequence[tuple[Sequence[Any], int]]) -> list[list[tuple[str, int]]]:
    """Values of each segment in order, each with its number of repeats.

    Args:
        values: of all layers.
        segments: ``DecoderConfig.segments``.

    Raises:
        ValueError: the numbers of layers do not add up, or a value ends inside a group that repeats together. The
            message is the end of a sentence about the setting.
    """
    layers = sum(len(group) * repeats for group, repeats in segments)
    counted = sum(count or 0 for _, count in values)
    rest = layers - counted
    if rest < 0 or (values[-1][1] is not None and rest) or (values[-1][1] is None and not rest):
        raise ValueError(f"covers {counted} layers, but the model has {layers}.")
    names = [name for name, _ in values]
    left = [rest if count is None else count for _, count in values]
    out: list[list[tuple[str, int]]] = []
    for group, repeats in segments:
        pieces: list[tuple[str, int]] = []
        while repeats:
            some = min(repeats, left[0] // len(group))
            if not some:
                raise ValueError(
                    f"splits a group of {len(group)} layers that repeat together; give each value a multiple of "
                    f"{len(group)} layers."
                )
            pieces.append((names[0], some))
            repeats -= some
            left[0] -= some * len(group)
            if not left[0]:
                names, left = names[1:], left[1:]
        out.append(pieces)
    return out
