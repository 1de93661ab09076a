"""Tier rates: how fast a model's layers compute, and how fast they come from host memory and from files.

``jaxllm bench MODEL --tiers`` measures them (``tier_benchmark``) or ``roofline_rates`` takes them from data sheets; the
placement of weights is solved with them (``placement_fit``).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.files import read_json, write_json


@dataclass(frozen=True)
class TierRates:
    """Rates of a device, of its link to the host, and of a disk, for one model.

    Attributes:
        device: kind of device.
        tokens: tokens of a step, ascending.
        layer_seconds: seconds in which all layers compute so many tokens, with all weights on the device.
        end_seconds: seconds of the rest of such a step: embedding, head, sampler, host.
        host: bytes/s from host memory to the device.
        disk: bytes/s from files to host memory, by all loader threads together.
        disk_thread: bytes/s from files by one thread.
        disk_cold: bytes/s by all threads from files that are not in the host's page cache; None: the same.
        loaders: loader threads.
        slowdown: how many times longer layers compute while files are read: more than 1 where both need the processor.
        disk_share: share of its rate at which files are read while layers compute.
    """

    device: str
    tokens: tuple[int, ...]
    layer_seconds: tuple[float, ...]
    end_seconds: tuple[float, ...]
    host: float
    disk: float
    disk_thread: float
    disk_cold: float | None = None
    loaders: int = 2
    slowdown: float = 1.0
    disk_share: float = 1.0

    def __post_init__(self) -> None:
        many = len(self.tokens)
        if not many or many != len(self.layer_seconds) or many != len(self.end_seconds):
            raise ValueError(
                f"tier rates: {many} token counts and {len(self.layer_seconds)} times; give as many of both."
            )
        if list(self.tokens) != sorted(set(self.tokens)):
            raise ValueError(f"tier rates: tokens = {self.tokens}; give them ascending.")
        numbers = (*self.layer_seconds, self.host, self.disk, self.disk_thread, self.disk_share, self.slowdown)
        if min(self.tokens) < 1 or not min(numbers) > 0 or min(self.end_seconds) < 0:
            raise ValueError("tier rates: all token counts, times and rates have to be above 0.")

    def layers(self, tokens: int) -> float:
        """Seconds of all layers for a step of so many tokens: linear between measured ones, proportional beyond."""
        return _between(tokens, self.tokens, self.layer_seconds)

    def ends(self, tokens: int) -> float:
        """Seconds of the rest of a step of so many tokens."""
        return _between(tokens, self.tokens, self.end_seconds)

    def cold(self) -> TierRates:
        """The rates of files that are not in the page cache."""
        if self.disk_cold is None:
            return self
        thread = min(self.disk_thread, self.disk_cold / self.loaders)  # measured by all of them together
        return dataclasses.replace(self, disk=self.disk_cold, disk_thread=thread)

    def __str__(self) -> str:
        """Table: the tiers, then computing by tokens of a step."""
        gib = lambda rate: f"{rate / 2**30:8.2f} GiB/s"  # noqa: E731
        cold = "" if self.disk_cold is None else f", {gib(self.disk_cold).strip()} without the page cache"
        lines = [
            f"{self.device}, {self.loaders} loaders",
            f"host to device   {gib(self.host)}",
            f"disk to host     {gib(self.disk)} from the page cache, one thread {gib(self.disk_thread).strip()}{cold}",
            f"while files are read, layers take {self.slowdown:.2f} times as long, and reads have "
            f"{self.disk_share:.0%} of their rate",
            f"{'tokens':>6} {'layers ms':>10} {'rest ms':>10}",
        ]
        lines += [f"{n:6} {1e3 * self.layers(n):10.2f} {1e3 * self.ends(n):10.2f}" for n in self.tokens]
        return "\n".join(lines)

    def write(self, path: Path) -> None:
        """Writes them to a JSON file."""
        write_json(path, dataclasses.asdict(self))

    @classmethod
    def read(cls, path: Path) -> TierRates:
        """Rates of a JSON file.

        Raises:
            ValueError: it is not one of ``write``.
        """
        try:
            found: dict[str, Any] = {n: tuple(x) if isinstance(x, list) else x for n, x in read_json(path).items()}
            return cls(**found)
        except (OSError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"{path} has no tier rates: {error}. Write it with `jaxllm bench MODEL --tiers {path}`."
            ) from error


def roofline_rates(
    device: str,
    layer_bytes: int,
    parameters: int,
    *,
    flops: float,
    bandwidth: float,
    host: float,
    disk: float,
    expert_parameters: int = 0,
    routed: float = 1.0,
) -> TierRates:
    """Rates by data sheet: a step of layers takes as long as its arithmetic, or as reading the weights once.

    Of a mixture a token computes with its experts alone; a step reads those that any of its tokens is routed to, by
    chance each as often as the others.

    Args:
        device: kind of device.
        layer_bytes, parameters: bytes and number of the parameters of all layers.
        flops, bandwidth: FLOP/s and bytes/s of the device.
        host, disk: bytes/s of the link to the host, and of the disk.
        expert_parameters: of the parameters, those of experts.
        routed: share of the experts that a token is routed to.
    """
    experts = expert_parameters / max(1, parameters)

    def seconds(tokens: int) -> float:
        computed = parameters * (1 - experts + experts * routed) * tokens
        read = layer_bytes * (1 - experts + experts * (1 - (1 - routed) ** tokens))
        return max(2 * computed / flops, read / bandwidth)

    tokens = tuple(2**n for n in range(13))
    return TierRates(device, tokens, tuple(map(seconds, tokens)), (0.0,) * len(tokens), host, disk, disk)


def _between(tokens: int, known: tuple[int, ...], seconds: tuple[float, ...]) -> float:
    if tokens > known[-1]:
        return seconds[-1] * tokens / known[-1]
    return float(np.interp(tokens, known, seconds))
