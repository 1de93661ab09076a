"""Argument of pools: the pools of an engine by what they do, their devices, and engines of a pool.

PoolSizes.parse("prefill=tensor:2 x1, decode=tensor:4 x1")
AttentionPoolSizes.parse("model=tensor:2, attention=tensor:4")
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from jaxllm.config import ConfigError

_PART = re.compile(r"\s*(\w+)\s*=\s*(\w+)\s*:\s*(\d+)\s*(?:x\s*(\d+)\s*)?")
EXAMPLE = '"prefill=tensor:2 x1, decode=tensor:4 x1"'
ATTENTION_EXAMPLE = '"model=tensor:2, attention=tensor:4"'
ATTENTION_AXES = ("tensor", "context")
"""Axes that an attention pool is split over."""
_PHASES, _PARTS = ("prefill", "decode"), ("model", "attention")


@dataclass(frozen=True)
class PoolSize:
    """Size of a pool.

    Attributes:
        tensor: devices of an engine, over which heads, their pages, feed-forward width and vocabulary are split.
        engines: engines of the pool, each with weights and pages of its own.
    """

    tensor: int = 1
    engines: int = 1

    @property
    def devices(self) -> int:
        """Devices of the pool."""
        return self.tensor * self.engines


@dataclass(frozen=True)
class PoolSizes:
    """Sizes of a prefill pool and a decode pool."""

    prefill: PoolSize
    decode: PoolSize

    @classmethod
    def parse(cls, text: str) -> PoolSizes:
        """Sizes from text such as "prefill=tensor:2 x1, decode=tensor:4 x1"; without "xN" a pool has one engine.

        Raises:
            ValueError: the text is not that; says what is wrong, and what is legal.
        """
        found: dict[str, PoolSize] = {}
        for name, axis, tensor, engines in _read(text, _PHASES):
            if axis != "tensor":
                raise ConfigError(
                    f"engine: pools = {text!r}: an engine of a pool is split over tensor, not over {axis}; several "
                    "engines (xN) are data parallelism."
                )
            found[name] = PoolSize(tensor, 1 if engines is None else engines)
        return cls(**found)

    @property
    def devices(self) -> int:
        """Devices of both pools."""
        return self.prefill.devices + self.decode.devices


@dataclass(frozen=True)
class AttentionPoolSizes:
    """Sizes of the two pools of one engine whose attention has devices of its own.

    Attributes:
        model: devices with the weights, which are split over them as over ``tensor``.
        attention: devices with the KV cache.
        axis: "tensor": heads and their pages are split over the attention devices; "context": the pages of each
            sequence are spread over them.
    """

    model: int
    attention: int
    axis: str = "tensor"

    @classmethod
    def parse(cls, text: str) -> AttentionPoolSizes:
        """Sizes from text such as "model=tensor:2, attention=tensor:4".

        Raises:
            ValueError: the text is not that; says what is wrong, and what is legal.
        """
        found = {part.name: part for part in _read(text, _PARTS)}
        if any(part.engines is not None for part in found.values()):
            raise ConfigError(
                f"engine: pools = {text!r}: model and attention are the pools of one engine: leave xN out, and start "
                "several servers for several engines."
            )
        model, attention = (found[name] for name in _PARTS)
        if model.axis != "tensor":
            raise ConfigError(f"engine: pools = {text!r}: weights are split over tensor, not over {model.axis}.")
        if attention.axis not in ATTENTION_AXES:
            raise ConfigError(
                f"engine: pools = {text!r}: attention is split over tensor (heads) or context (pages), not over "
                f"{attention.axis}; write {ATTENTION_EXAMPLE}."
            )
        return cls(model.size, attention.size, attention.axis)

    @property
    def devices(self) -> int:
        """Devices of both pools."""
        return self.model + self.attention


class _Part(NamedTuple):
    """Part of the text: name of a pool, axis and devices of an engine, engines, None where they are not given."""

    name: str
    axis: str
    size: int
    engines: int | None


def are_attention_pools(text: str) -> bool:
    """Whether a text names an attention pool, and is to be read by ``AttentionPoolSizes``."""
    names = {part.partition("=")[0].strip() for part in text.split(",")}
    return bool(names & set(_PARTS)) and not names & set(_PHASES)


def parse_pools(text: str) -> PoolSizes | AttentionPoolSizes:
    """Sizes of pools of either kind.

    Raises:
        ValueError: see ``PoolSizes.parse`` and ``AttentionPoolSizes.parse``.
    """
    return (AttentionPoolSizes if are_attention_pools(text) else PoolSizes).parse(text)


def _read(text: str, names: tuple[str, str]) -> list[_Part]:
    """Parts of a text that has each of these pools once."""
    example = EXAMPLE if names == _PHASES else ATTENTION_EXAMPLE
    found: dict[str, _Part] = {}
    for part in text.split(","):
        if (match := _PART.fullmatch(part)) is None:
            raise ConfigError(f"engine: pools = {text!r}: cannot read {part.strip()!r}; write them as {example}.")
        name, axis, size, engines = match.groups()
        if name not in names or name in found:
            wrong = "is given twice" if name in found else f"is no pool beside {names[0]} and {names[1]}"
            raise ConfigError(
                f"engine: pools = {text!r}: {name!r} {wrong}; give prefill and decode, or model and attention, once "
                "each."
            )
        found[name] = _Part(name, axis, int(size), None if engines is None else int(engines))
        if not found[name].size or found[name].engines == 0:
            raise ConfigError(f"engine: pools = {text!r}: give {name} 1 or more engines and devices.")
    if len(found) < 2:
        raise ConfigError(f"engine: pools = {text!r}: both pools are needed; write them as {example}.")
    return list(found.values())
