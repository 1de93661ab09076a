"""Slot fit: what experts in slots make of a model's bytes, its rates and the limits of a placement.

With N of the E experts of each mixture in slots, the rest of the layers is placed as layers are, the host or files have
the experts, and a step loads those that it wants and that are in no slot. So a number of slots is one more way to place
a model, which the solver tries beside whole layers.

What loads cost is measured, with some shares of the experts in slots (``SlotRates``): on real routings,
and overlapped with computing as far as they are. Without such measurements the experts that a step wants are taken to
be by chance, each token's k of E experts as often as any others, and loads not to overlap. Then a step of T tokens
wants E (1 - (1 - k / E)^T) experts of each mixture, and a share N / E of them is in slots, whichever those are
(EdgeMoE, arXiv:2308.14352, section 2, measures that real routers repeat themselves, which makes loads fewer).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from jaxllm.infer.streaming.tier_rates import TierRates

CHOICES = 8
"""Numbers of slots that are tried, evenly spread up to all experts."""


@dataclass(frozen=True)
class MixtureBytes:
    """Mixtures of a model.

    Attributes:
        rest: bytes of each unit without experts.
        slot: bytes of an expert of every mixture: those that one slot of each of them needs.
        largest: bytes of the largest expert.
        experts: experts of a mixture; of the smallest one, if they differ.
        routed: share of the experts that a token is routed to.
        layers: number of mixtures.
    """

    rest: tuple[int, ...]
    slot: int
    largest: int
    experts: int
    routed: float
    layers: int

    def choices(self) -> list[int]:
        """Numbers of slots to choose from."""
        return sorted({max(1, round(self.experts * n / CHOICES)) for n in range(1, CHOICES + 1)})

    def missing(self, slots: int, tokens: int) -> float:
        """Experts of all mixtures that a step of so many tokens is to load."""
        wanted = self.experts * (1 - (1 - self.routed) ** tokens)
        return self.layers * wanted * (1 - slots / self.experts)


@dataclass(frozen=True)
class SlotPlaces:
    """Experts of a model in slots, and where the others are.

    Attributes:
        slots: experts of each mixture on the device.
        from_files: share of all experts that are in files, the others being in host memory.
        loaders: threads that read them.
        late: share of the layers for which no experts are loaded ahead.
    """

    slots: int
    from_files: float = 0.0
    loaders: int = 1
    late: float = 0.0


def link_seconds(mixtures: MixtureBytes, rates: TierRates, places: SlotPlaces, tokens: int) -> tuple[float, float]:
    """Seconds in which a step's loads of experts have the link to the host, and the disk, which layers use too.

    By chance, or what loads were measured to take at most, if that is less: real routings repeat themselves.

    Args:
        mixtures, rates: of the model with whole layers.
        places: where experts are.
        tokens: of the step.
    """
    missing = mixtures.missing(places.slots, tokens)
    size = missing * mixtures.slot / mixtures.layers
    readers = max(1, min(places.loaders, round(missing / mixtures.layers)))
    link, disk = size / rates.host, places.from_files * size / rates.disk_rate(readers)
    if rates.slots is None:
        return link, disk
    late = replace(places, late=1.0)
    most = layers_with_slots(mixtures, rates, late, tokens) - rates.slots.seconds(tokens, 1.0)
    return max(0.0, min(link, most)), max(0.0, min(disk, most))


def layers_with_slots(mixtures: MixtureBytes, rates: TierRates, places: SlotPlaces, tokens: int) -> float:
    """Seconds of all layers for a step of so many tokens, with the loads of experts.

    Args:
        mixtures, rates: of the model with whole layers.
        places: where experts are.
        tokens: of the step.
    """
    missing = mixtures.missing(places.slots, tokens)
    # No more threads read at a time than experts are missing in a layer.
    readers = max(1, min(places.loaders, round(missing / mixtures.layers)))
    by_disk = missing * mixtures.slot / mixtures.layers / rates.disk_rate(readers)
    of_host = missing * mixtures.slot / mixtures.layers / rates.host
    measured = rates.slots
    if measured is None:
        return rates.layers(tokens) + of_host + places.from_files * by_disk
    share, last = places.slots / mixtures.experts, min(tokens, measured.tokens[-1])
    # Beyond what was measured, loads grow less than in proportion to tokens.
    growth = missing / mixtures.missing(places.slots, last) if share < 1 else 1.0

    def loads(tier: Literal["host", "files"]) -> float:
        return growth * (measured.seconds(last, share, tier=tier, late=places.late) - measured.seconds(last, 1.0))

    by_host = loads("host")
    if measured.files:
        # Reading, which is what files add to copies, by another number of threads than was measured.
        then = max(1, min(measured.loaders, round(missing / mixtures.layers)))
        reading = loads("files") - by_host
        by_disk = max(0.0, reading) * rates.disk_rate(then) / rates.disk_rate(readers) + min(0.0, reading)
    return measured.seconds(tokens, 1.0) + by_host + places.from_files * by_disk


def rates_with_slots(mixtures: MixtureBytes, rates: TierRates, places: SlotPlaces) -> TierRates:
    """Rates of the layers without their experts, whose loads are a part of computing.

    Args:
        mixtures, rates: of the model with whole layers.
        places: where experts are.
    """
    last = rates.tokens[-1]
    # More of them than were measured, since loads grow less than in proportion to tokens.
    tokens = tuple(sorted({*rates.tokens, *(2**n for n in range(max(13, last.bit_length())))}))
    of_layers = (layers_with_slots(mixtures, rates, places, n) for n in tokens)
    beside = lambda rows, at: tuple(tuple(at(n, k + 1) for n in tokens) for k in range(len(rows)))  # noqa: E731
    return replace(
        rates, tokens=tokens, layer_seconds=tuple(of_layers), end_seconds=tuple(map(rates.ends, tokens)), slots=None,
        slowdowns=beside(rates.slowdowns, rates.slowdown), disk_shares=beside(rates.disk_shares, rates.disk_share),
    )  # fmt: skip


def experts_on_host(
    mixtures: MixtureBytes, slots: int, host: float, device: float, loaders: int, disk: bool
) -> tuple[int | None, float] | None:
    """Bytes of experts that go to the host, and of what is left there for the rest of layers.

    Args:
        mixtures: the model's.
        slots: experts of each mixture on the device.
        host: bytes of host memory.
        device: bytes that are left on the device for the rest of layers.
        loaders: threads that read layers, each of which has a buffer there.
        disk: experts may be in files.

    Returns:
        (the bytes, or None for all experts; what is left), or None: they do not fit.
    """
    whole = mixtures.experts * mixtures.slot
    if host >= whole and not disk:
        return None, host - whole
    if not disk:
        return None
    # The rest of layers comes first: all of it is read in every step, and of the experts some.
    rest = max(0.0, sum(mixtures.rest) - max(0.0, device)) + loaders * max(mixtures.rest)
    if host - rest >= whole:
        return None, host - whole
    round_of_loads = slots * mixtures.largest
    most = math.floor(host - rest - round_of_loads)
    if most < 0:
        return (0, host - round_of_loads) if host >= round_of_loads else None
    return most, host - most - round_of_loads
