"""Argument of disaggregated pools: engines of each pool and devices of an engine, such as "prefill=tensor:2 x1, ...".

PoolSizes.parse("prefill=tensor:2 x1, decode=tensor:4 x1")
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from jaxllm.config import ConfigError

_PART = re.compile(r"\s*(\w+)\s*=\s*(\w+)\s*:\s*(\d+)\s*(?:x\s*(\d+)\s*)?")
EXAMPLE = '"prefill=tensor:2 x1, decode=tensor:4 x1"'


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
        for part in text.split(","):
            if (match := _PART.fullmatch(part)) is None:
                raise ConfigError(f"engine: pools = {text!r}: cannot read {part.strip()!r}; write them as {EXAMPLE}.")
            name, axis, tensor, engines = match.groups()
            if name not in ("prefill", "decode") or name in found:
                wrong = "is given twice" if name in found else "is no pool"
                raise ConfigError(f"engine: pools = {text!r}: {name!r} {wrong}; give prefill and decode, once each.")
            if axis != "tensor":
                raise ConfigError(
                    f"engine: pools = {text!r}: an engine of a pool is split over tensor, not over {axis}; several "
                    "engines (xN) are data parallelism."
                )
            size = PoolSize(int(tensor), int(engines or 1))
            if not size.devices:
                raise ConfigError(f"engine: pools = {text!r}: give {name} 1 or more engines and devices.")
            found[name] = size
        if len(found) < 2:
            raise ConfigError(f"engine: pools = {text!r}: both pools are needed; write them as {EXAMPLE}.")
        return cls(**found)

    @property
    def devices(self) -> int:
        """Devices of both pools."""
        return self.prefill.devices + self.decode.devices
