"""Tier rates: how fast a model's layers compute, and how fast they come from host memory and from files.

``jaxllm bench MODEL --tiers`` measures them (``tier_benchmark``) or ``roofline_rates`` takes them from data sheets; the
placement of weights is solved with them (``placement_fit``).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxllm.files import read_json, write_json
from jaxllm.infer.streaming.experts.slot_rates import SlotRates, seconds_of


@dataclass(frozen=True)
class TierRates:
    """Rates of a device, of its link to the host, and of a disk, for one model.

    Attributes:
        device: kind of device.
        tokens: tokens of a step, ascending.
        layer_seconds: seconds in which all layers compute so many tokens, with all weights on the device.
        end_seconds: seconds of the rest of such a step: embedding, head, sampler, host.
        host: bytes/s from host memory to the device.
        disk: bytes/s from files to host memory, by one loader thread, by two together, and so on.
        disk_cold: the same of files that are not in the host's page cache; empty: the same rates.
        slowdowns: how many times longer a step takes while files are read, more than 1 where both need the processor:
            for each number of loaders, by the tokens of the step; empty: as long.
        disk_shares: shares of their rates at which so many loaders read beside such steps; empty: all of them.
        slots: of a mixture, layers with experts in slots; None: not measured.
    """

    device: str
    tokens: tuple[int, ...]
    layer_seconds: tuple[float, ...]
    end_seconds: tuple[float, ...]
    host: float
    disk: tuple[float, ...]
    disk_cold: tuple[float, ...] = ()
    slowdowns: tuple[tuple[float, ...], ...] = ()
    disk_shares: tuple[tuple[float, ...], ...] = ()
    slots: SlotRates | None = None

    def __post_init__(self) -> None:
        many = len(self.tokens)
        if not many or many != len(self.layer_seconds) or many != len(self.end_seconds):
            raise ValueError(
                f"tier rates: {many} token counts and {len(self.layer_seconds)} times; give as many of both."
            )
        if list(self.tokens) != sorted(set(self.tokens)):
            raise ValueError(f"tier rates: tokens = {self.tokens}; give them ascending.")
        for name, rows in (("slowdowns", self.slowdowns), ("disk_shares", self.disk_shares)):
            if rows and [len(row) for row in rows] != [many] * len(self.disk):
                raise ValueError(f"tier rates: {name} needs a row for each rate of the disk, of as many as tokens.")
        if not self.disk or (self.disk_cold and len(self.disk_cold) != len(self.disk)):
            raise ValueError("tier rates: give the rate of the disk for one loader at least, cold ones for as many.")
        beside = (*self.slowdowns, *self.disk_shares)
        numbers = (*self.layer_seconds, self.host, *self.disk, *self.disk_cold, *itertools.chain.from_iterable(beside))
        if min(self.tokens) < 1 or not min(numbers) > 0 or min(self.end_seconds) < 0:
            raise ValueError("tier rates: all token counts, times and rates have to be above 0.")

    def layers(self, tokens: int) -> float:
        """Seconds of all layers for a step of so many tokens: linear between measured ones, proportional beyond."""
        return seconds_of(tokens, self.tokens, self.layer_seconds)

    def ends(self, tokens: int) -> float:
        """Seconds of the rest of a step of so many tokens."""
        return seconds_of(tokens, self.tokens, self.end_seconds)

    def disk_rate(self, loaders: int) -> float:
        """Bytes/s from files by so many loaders together; more than were measured are no faster."""
        return self.disk[min(loaders, len(self.disk)) - 1]

    def slowdown(self, tokens: int, loaders: int) -> float:
        """Ratio of the time of a step while so many loaders read files, to its time alone."""
        return self._beside(self.slowdowns, tokens, loaders)

    def disk_share(self, tokens: int, loaders: int) -> float:
        """Share of their rate at which so many loaders read files beside a step of so many tokens."""
        return self._beside(self.disk_shares, tokens, loaders)

    def _beside(self, rows: tuple[tuple[float, ...], ...], tokens: int, loaders: int) -> float:
        return float(np.interp(tokens, self.tokens, rows[min(loaders, len(rows)) - 1])) if rows else 1.0

    def cold(self) -> TierRates:
        """The rates of files that are not in the page cache."""
        if not self.disk_cold:
            return self
        slots = None if self.slots is None else dataclasses.replace(self.slots, files=(), files_late=())
        return dataclasses.replace(self, disk=self.disk_cold, slots=slots)

    def __str__(self) -> str:
        """Table: the tiers, then computing by tokens of a step, and what reading beside it does to both."""
        gib = lambda rates: ", ".join(f"{rate / 2**30:.2f}" for rate in rates) + " GiB/s"  # noqa: E731
        many = range(1, len(self.disk) + 1)
        lines = [
            self.device,
            f"host to device   {gib((self.host,))}",
            f"disk to host     {gib(self.disk)} by {', '.join(map(str, many))} loaders",
        ]
        if self.disk_cold:
            lines.append(f"  outside of the page cache {gib(self.disk_cold)}")
        beside = [f"beside {n}" for n in many] if self.slowdowns else []
        in_slots = [] if self.slots is None else _columns(self.slots)
        slots = "".join(f"{name:>11} " for name, _ in in_slots)
        lines.append(
            f"{'tokens':>6} {'layers ms':>10} {slots}{'rest ms':>10} " + " ".join(f"{name:>16}" for name in beside)
        )
        for n in self.tokens:
            cells = [f"{self.slowdown(n, k):7.2f} x, {self.disk_share(n, k):4.0%}" for k in many] if beside else []
            times = [1e3 * seconds(n) for _, seconds in in_slots]
            row = f"{n:6} {1e3 * self.layers(n):10.2f} "
            row += "".join(f"{ms:11.2f} " for ms in times) + f"{1e3 * self.ends(n):10.2f} "
            lines.append((row + " ".join(f"{cell:>16}" for cell in cells)).rstrip())
        if slots:
            lines.append(
                "N%: ms of the layers with so many of their experts in slots, the others in host memory or files"
            )
        if beside:
            lines.append(
                "beside K: while K loaders read, how many times longer steps take, and the share of their rate"
            )
        return "\n".join(line.rstrip() for line in lines)

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
            found = {name: _tuples(value) for name, value in read_json(path).items()}
            if found.get("slots") is not None:
                found["slots"] = SlotRates(**{name: _tuples(value) for name, value in found["slots"].items()})
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
    return TierRates(device, tokens, tuple(map(seconds, tokens)), (0.0,) * len(tokens), host, (disk,))


def _columns(slots: SlotRates) -> list[tuple[str, Callable[[int], float]]]:
    """Columns of the table: shares of the experts in slots, and where the others are; each by tokens of a step."""

    def of(share: float, tier: Literal["host", "files"]) -> Callable[[int], float]:
        return lambda tokens: slots.seconds(tokens, share, tier=tier)

    tiers: tuple[Literal["host", "files"], ...] = ("host", "files") if slots.files else ("host",)
    return [
        (f"{share:.0%} {tier if share < 1 else ''}".strip(), of(share, tier))
        for share in slots.shares
        for tier in (tiers if share < 1 else tiers[:1])
    ]


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
