"""Remat solver: what each layer keeps, computes again, or moves to the host, in the least time under memory budgets.

Moccasin (arXiv:2304.14463, section 2) states rematerialisation with intervals in which each value is retained. A
value of a block is needed in the block's forward pass and in its backward pass: it is retained in between, or
computed once more. So a block's intervals are the set of values that it keeps ("save:qkv+attention"), and the number
of layers with each set says for how many layers each value is retained: a few integers per segment of the model
instead of a choice for every value of every layer. This is a small integer program, minimal time under a memory
bound, with ProTrain's third choice for a block, which is to move its activations to the host (arXiv:2406.08334), of
all tokens or of MEMO's share of them (arXiv:2407.12117). Copies cost what the passes beside them do not hide. Sizes
are measured by the compiler: the step is compiled with each named policy for all layers, which sets of values share
by their widths, then with the solution; the difference between the solution's program and the sum of its parts
corrects the bounds for another try. Each policy of a segment is a loop, which takes memory of its own: programs of two
and of three policies have a correction each.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import optimize

from jaxllm.models import DecoderConfig
from jaxllm.models.remat import ELEMENTWISE, VALUES, RematError, moved_values, save_policy, saved_values
from jaxllm.plan.formulas.device_work import DeviceWork
from jaxllm.plan.formulas.step_time import predict_work
from jaxllm.plan.hardware import Cluster
from jaxllm.train.config import RunConfig
from jaxllm.train.model_flops import hardware_flops_per_token, recomputed_flops, train_flops_per_token
from sharding import MeshSpec

NAMED = ("full", "attention", "elementwise", "none")
"""Policies from the least saved to the most; layers get them in this order, so that the backward pass uses up first
what saves most.
"""
HOSTED = ("offload:0", "offload")
"""Policies that move activations to the host: of a part of a layer, and all; these layers come first, so that their
copies have the longest time to arrive."""
SHARE = 1 / 16
"""Steps of the share of tokens whose matmul results are moved to the host."""
CLOSE = 0.95
"""Fraction of a budget beyond which no better solution is tried."""
ALONE = 2
"""Most sets of values that are compiled for all layers."""
TRIES = 5
LOOPS = 3
"""Most policies of a segment: each is a loop of its own in the program."""


class StepBytes(NamedTuple):
    """Bytes that a step takes on a device, and in its host's memory."""

    device: int
    host: int = 0


Measure = Callable[[str], StepBytes]
"""Function from ``model.remat`` to the bytes that the step takes."""


@dataclass(frozen=True)
class HostTier:
    """Host memory as a place for activations, a device's share.

    Attributes:
        bytes: most bytes of it.
        seconds_per_byte: of the link, each way.
        seconds_per_flop: seconds that a FLOP for every token of a micro-batch takes on the device.
    """

    bytes: int
    seconds_per_byte: float
    seconds_per_flop: float

    @classmethod
    def of(cls, config: RunConfig, cluster: Cluster, mesh: MeshSpec, limit: int) -> HostTier:
        """Host of a cluster's device, whose arithmetic takes what the plan predicts (``jaxllm.plan.formulas``)."""
        run = dataclasses.replace(config, model=dataclasses.replace(config.model, remat="none"))
        work = DeviceWork.of(run, mesh)
        seconds = predict_work(work, cluster).compute / work.micro_batches
        flops = train_flops_per_token(run.model, run.data.seq_len)
        return cls(limit, 1 / cluster.hardware.host, seconds / flops)

    def exposed(self, sent: float, forward: float, backward: float) -> float:
        """Seconds of copies that the passes do not hide: out during the forward pass, back during the backward one.

        Args:
            sent: bytes each way.
            forward, backward: FLOPs per token of the passes, recomputation included.
        """
        copies = sent * self.seconds_per_byte
        return sum(max(0.0, copies - flops * self.seconds_per_flop) for flops in (forward, backward))


class RematCandidate(NamedTuple):
    """Policies for all layers.

    Attributes:
        bytes: measured bytes of a device.
        flops: FLOPs per token, recomputation included.
        host: measured bytes in the host's memory.
        exposed: exposed seconds of copies in a micro-batch.
    """

    bytes: int
    flops: float
    host: int = 0
    exposed: float = 0.0


@dataclass(frozen=True)
class RematSolution:
    """Remat policies, and the candidates they were compared with.

    Attributes:
        remat: value for ``model.remat``.
        chosen: its bytes and costs.
        named: each policy for all layers.
        tried: every other candidate that was measured.
    """

    remat: str
    chosen: RematCandidate
    named: Mapping[str, RematCandidate]
    tried: Mapping[str, RematCandidate]

    @property
    def bytes(self) -> int:
        """Measured bytes of a device."""
        return self.chosen.bytes

    @property
    def flops(self) -> float:
        """FLOPs per token, recomputation included."""
        return self.chosen.flops


def solve(
    config: RunConfig,
    budget: int,
    measure: Measure,
    host: HostTier | None = None,
    widths: Mapping[str, float] | None = None,
    placed: Sequence[str] = (),
    alike: Sequence[str] = (),
) -> RematSolution:
    """Per-layer policies that take the least time among those whose step takes at most ``budget`` bytes.

    Args:
        config: the run; its own remat is ignored.
        budget: bytes of a device, for everything that the step takes.
        measure: compiles the step.
        host: where activations may be moved to; None: nowhere, and the least time is the least recomputation.
        widths: bytes of each value that "save" can keep; None: in proportion to its numbers per token.
        placed: further policies of "save" that move values, to be considered with ``host``.
        alike: the only policies that the run can have, each for all layers, "full" among them, as pipelines do; empty:
            all, and mixtures of them.

    Raises:
        RematError: no policy for all layers fits.
    """
    model, seq_len = config.model, config.data.seq_len
    forward = train_flops_per_token(model, seq_len) / 3

    def measured(remat: str) -> RematCandidate:
        device, there = measure(remat)
        flops = hardware_flops_per_token(dataclasses.replace(model, remat=remat), seq_len)
        exposed = 0.0 if host is None else host.exposed(there, forward, flops - forward)
        return RematCandidate(device, flops, there, exposed)

    def fits(one: RematCandidate) -> bool:
        return one.bytes <= budget and one.host <= (0 if host is None else host.bytes)

    def seconds(one: RematCandidate) -> float:
        return one.flops if host is None else one.flops * host.seconds_per_flop + one.exposed

    named = {name: measured(name) for name in alike or (NAMED if host is None else (*HOSTED, *NAMED))}
    if alike:
        if not (found := {name: one for name, one in named.items() if fits(one)}):
            raise _nothing_fits(named, budget, host)
        remat = min(found, key=lambda one: (seconds(found[one]), -found[one].bytes))
        return RematSolution(remat, found[remat], named, {})
    if host is not None and (share := hidden_share(named["offload:0"], named["offload"], host, forward)):
        name = f"offload:{share:g}"
        named = {name: measured(name)} | named
    found = {name: one for name, one in named.items() if fits(one)}
    if not found and (host is None or min(one.bytes for one in named.values()) > budget):
        raise _nothing_fits(named, budget, host)
    base = named["full"]
    sizes = {name: (one.bytes - base.bytes) / model.layers for name, one in named.items()}
    values = value_sizes(model, sizes, widths)
    sets = list(saved_bytes(model, sizes, seq_len, widths))
    there_of = {name: one.host / model.layers for name, one in named.items()}
    for name in sets if host is None else [*sets, *moved_policies(sets), *placed]:
        sizes[name], there_of[name] = places_bytes(name, values)
    layer = {
        name: LayerCost(
            sizes[name],
            there_of[name],
            [recomputed_flops(name, model, group, seq_len) for group, _ in model.segments],
        )
        for name in sorted(sizes, key=lambda name: (not there_of[name], sizes[name]))  # those on the host come first
    }
    tried: dict[str, RematCandidate] = {}

    def alone(name: str) -> RematCandidate:
        """Policy for all layers, by the sizes of a layer."""
        again = sum(n * cost for (_, n), cost in zip(model.segments, layer[name].flops, strict=True))
        device, away = (int(model.layers * size) for size in (layer[name].device, layer[name].host))
        exposed = 0.0 if host is None else host.exposed(away, forward, 2 * forward + again)
        return RematCandidate(base.bytes + device, 3 * forward + again, away, exposed)

    def whole(name: str) -> RematCandidate:
        """Policy for all layers, measured; its bytes are those of a layer from now on."""
        one = tried[name] = tried[name] if name in tried else measured(name)
        sizes = (one.bytes - base.bytes) / model.layers, one.host / model.layers
        layer[name] = layer[name]._replace(device=sizes[0], host=sizes[1])
        return one

    # The best of them is one loop: it is there if mixtures take more than their parts. What the first takes beyond its
    # sizes, or less than them, others take too.
    beyond = 0
    for _ in range(ALONE):
        single = {name: alone(name) for name in layer if name not in named and name not in tried}
        single = {name: one for name, one in single.items() if fits(one._replace(bytes=one.bytes + beyond))}
        remat = min(single, key=lambda name: seconds(single[name]), default="")
        if not single or (tried and seconds(single[remat]) >= min(map(seconds, found.values()), default=math.inf)):
            break
        one = whole(remat)
        beyond = one.bytes - single[remat].bytes if fits(one) else max(beyond, one.bytes - single[remat].bytes)
        if fits(one):
            found[remat] = one
    excess: dict[int, tuple[int, int]] = {}  # by loops, bytes of a mixed program beyond the sum of its parts
    solutions: set[str] = set()

    def mixture(loops: int) -> Mixture | None:
        """The mixture of least time of so many policies, if it was not measured yet."""
        known = max((n for n in excess if n <= loops), default=min(excess, default=loops))
        # In proportion, of a program with more loops where none with so many or fewer was measured.
        share = min(1.0, max(loops - 1, 1) / max(known - 1, 1))
        more, away = (share * one for one in excess.get(known, (0, 0)))
        limit = None if host is None else dataclasses.replace(host, bytes=int(host.bytes - max(0.0, away)))
        counts = solve_policies(model, layer, budget - base.bytes - more, limit, forward, loops)
        if counts is None or (remat := format_policies(model, counts)) in named or remat in solutions:
            return None
        again = sum(n * layer[name].flops[s] for s, row in enumerate(counts) for name, n in row)
        rows = zip(model.segments, counts, strict=True)
        parts = [(layer[name], n * len(group)) for (group, _), row in rows for name, n in row]
        device = base.bytes + round(sum(n * one.device for one, n in parts))
        there = round(sum(n * one.host for one, n in parts))
        exposed = 0.0 if host is None else host.exposed(there, forward, 2 * forward + again)
        parts_alone = RematCandidate(device, 3 * forward + again, there, exposed)
        return Mixture(max(map(len, counts)), remat, parts_alone)

    for _ in range(TRIES):
        mixtures = [one for loops in range(2, LOOPS + 1) if (one := mixture(loops)) is not None]
        fastest = min((seconds(one) for one in found.values()), default=math.inf)
        mixtures = [one for one in mixtures if seconds(one.parts) < fastest]
        if not mixtures:
            break
        loops, remat, parts = min(mixtures, key=lambda one: seconds(one.parts))
        solutions.add(remat)
        one = tried[remat] = whole(remat) if remat in layer else measured(remat)
        if fits(one):
            found[remat] = one
            if one.bytes >= CLOSE * budget:
                break
        if remat not in layer:
            excess[loops] = one.bytes - parts.bytes, one.host - parts.host
    if not found:
        raise _nothing_fits(named, budget, host)
    remat = min(found, key=lambda one: (seconds(found[one]), -found[one].bytes))
    return RematSolution(remat, found[remat], named, tried)


def saved_bytes(
    model: DecoderConfig, named: Mapping[str, float], seq_len: int, widths: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Bytes of a layer beside what "full" saves, for each set of values that "save" can keep, without those than which
    another set or a named policy keeps no more and recomputes no more.

    Args:
        model: the model.
        named: the same of the named policies.
        seq_len: tokens of a row.
        widths: bytes of each value; None: in proportion to its numbers per token.
    """
    sizes = value_sizes(model, named, widths)
    values = [value for value in VALUES if sizes.get(value)]
    found = {
        save_policy(kept): sum(map(sizes.__getitem__, kept))
        for n in range(1, len(values) + 1)
        for kept in itertools.combinations(values, n)
    }
    return _least(model, seq_len, {name: size for name, size in named.items() if name in NAMED}, found)


def value_sizes(
    model: DecoderConfig, named: Mapping[str, float], widths: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Bytes of a layer for each value that "save" can keep, and for "input", the block's input.

    The results of attention are what "elementwise" keeps and "attention" does not; the other values share what
    "attention" keeps by their widths.

    Args:
        model, named, widths: as for ``saved_bytes``.
    """
    widths = _widths(model) if widths is None else widths
    rate = named["attention"] / sum(widths.get(value, 0) for value in ELEMENTWISE if value != "attention")
    sizes = {value: rate * width for value, width in widths.items()}
    return sizes | {"attention": named["elementwise"] - named["attention"]}


def moved_policies(saved: Iterable[str]) -> list[str]:
    """Policies that move to the host what others keep, or nothing, with and without the block's input."""
    found: list[str] = []
    for policy in ("full", *saved):
        values = saved_values(policy) or ()
        found += [save_policy((), values)] * bool(values) + [save_policy((), (*values, "input"))]
    return found


def places_bytes(policy: str, sizes: Mapping[str, float]) -> tuple[float, float]:
    """Bytes of a layer with "save" on the device, beside what "full" saves, and on the host; values that the model
    does not have take none.
    """
    moved = moved_values(policy)
    here = sum(sizes.get(value, 0.0) for value in saved_values(policy) or () if value not in moved)
    return here - sizes["input"] * ("input" in moved), sum(sizes.get(value, 0.0) for value in moved)


def _widths(model: DecoderConfig) -> dict[str, float]:
    """Numbers per token of each value that "save" can keep or move, of all layers."""
    found: dict[str, float] = {"input": float(model.embed_dim * model.layers)}
    for block in model.blocks:
        for one in block.matmul_values(model.embed_dim):
            if one.name in VALUES:
                found[one.name] = found.get(one.name, 0) + one.width
    return found


def _least(
    model: DecoderConfig, seq_len: int, named: Mapping[str, float], sets: Mapping[str, float]
) -> dict[str, float]:
    """``sets`` without those than which another one, or a named policy, takes no more bytes and FLOPs."""

    def costs(policy: str) -> list[float]:
        return [recomputed_flops(policy, model, group, seq_len) for group, _ in model.segments]

    names = list(sets)
    width = 1 + len(model.segments)
    points = np.reshape([[sets[name], *costs(name)] for name in names], (-1, width))
    limits = np.reshape([[size, *costs(name)] for name, size in named.items()], (-1, width))
    kept: list[int] = []
    for i in np.lexsort(points.T[::-1]) if names else ():  # whatever takes no more in everything comes before
        others = np.vstack([limits, points[kept]])
        if not np.all(others <= points[i] * (1 + 1e-9), axis=1).any():
            kept.append(int(i))
    return {names[i]: sets[names[i]] for i in kept}


def hidden_share(none: RematCandidate, whole: RematCandidate, host: HostTier, forward: float) -> float:
    """Share of each row's tokens whose matmul results move to the host: the most that the forward pass hides and the
    host holds (MEMO, arXiv:2407.12117, section 4.1), in steps of ``SHARE``; 0 where that is none, or all.

    Args:
        none, whole: all layers with "offload:0" and with "offload".
        host: the host's memory and its link.
        forward: FLOPs per token of a forward pass, which copies out overlap.
    """
    least, most = none.host, whole.host
    hidden = forward * host.seconds_per_flop / host.seconds_per_byte if host.seconds_per_byte else float("inf")
    share = (min(hidden, host.bytes) - least) / max(1, most - least)
    return math.floor(share / SHARE) * SHARE if SHARE <= share < 1 else 0.0


def _nothing_fits(named: Mapping[str, RematCandidate], budget: int, host: HostTier | None) -> RematError:
    least = min(one.bytes for one in named.values())
    there = "" if host is None else f", with {host.bytes / 2**30:.3f} GiB of the host for activations"
    return RematError(
        f"with every block computed again a step takes {named['full'].bytes / 2**30:.3f} GiB, and at least "
        f"{least / 2**30:.3f} by any policy; that is more than {budget / 2**30:.3f}{there}: make the micro-batch "
        "smaller (accumulate), or split it over more devices."
    )


class Mixture(NamedTuple):
    """Different policies in one model, with what they cost by the sum of their parts.

    Attributes:
        loops: most policies of a segment: each is a loop.
        remat: value for ``model.remat``.
        parts: bytes, FLOPs and exposed seconds.
    """

    loops: int
    remat: str
    parts: RematCandidate


class LayerCost(NamedTuple):
    """Cost of a policy.

    Attributes:
        device: bytes of a layer on the device, beside what "full" saves.
        host: bytes of a layer on the host.
        flops: recomputed FLOPs of each segment's group.
    """

    device: float
    host: float
    flops: Sequence[float]


def solve_policies(
    model: DecoderConfig,
    layer: Mapping[str, LayerCost],
    room: float,
    host: HostTier | None = None,
    forward: float = 0.0,
    loops: int = LOOPS,
) -> list[list[tuple[str, int]]] | None:
    """Integer program: for each segment the number of repeats with each policy, without zeros; None if nothing fits.

    Args:
        model: the model.
        layer: cost of each policy.
        room: available bytes of the device, beside what "full" saves.
        host: where activations may be moved to.
        forward: FLOPs per token of a forward pass, which copies overlap.
        loops: most policies of a segment.
    """
    segments = model.segments
    pairs = list(itertools.product(range(len(segments)), layer))
    count = len(pairs)
    sizes = np.array([len(segments[s][0]) * layer[name].device for s, name in pairs])
    there = np.array([len(segments[s][0]) * layer[name].host for s, name in pairs])
    flops = np.array([layer[name].flops[s] for s, name in pairs])
    of_segment = np.array([[float(s == one) for s, _ in pairs] for one in range(len(segments))])
    repeats = np.array([count for _, count in segments], float)
    scale = max(1.0, float(np.abs(sizes).max()))  # scales bytes and times to about one, for the solver
    # Variables: the counts, whether each is not zero, and the exposed seconds of copies out and back.
    prices = flops if host is None else flops * host.seconds_per_flop
    unit = max(prices.max(), 1e-300) if host is None else max(forward * host.seconds_per_flop, 1e-300)

    def rows(matrix: np.ndarray, used: np.ndarray | None = None, out: float = 0.0, back: float = 0.0) -> np.ndarray:
        matrix = np.atleast_2d(matrix)
        used = np.zeros_like(matrix) if used is None else np.atleast_2d(used)
        return np.hstack([matrix, used, np.tile([[out, back]], (len(matrix), 1))])

    most = np.diag(-(of_segment.T @ repeats))
    constraints = [
        optimize.LinearConstraint(rows(of_segment), repeats, repeats),  # pyright: ignore[reportArgumentType]
        optimize.LinearConstraint(rows(sizes / scale), -np.inf, room / scale),
        optimize.LinearConstraint(rows(np.eye(count), most), -np.inf, 0.0),
        optimize.LinearConstraint(rows(np.zeros_like(of_segment), of_segment), -np.inf, loops),
    ]
    if host is not None:
        copies, again = there * host.seconds_per_byte / unit, flops * host.seconds_per_flop / unit
        pass_ = forward * host.seconds_per_flop / unit
        constraints += [
            optimize.LinearConstraint(rows(there / scale), -np.inf, host.bytes / scale),
            optimize.LinearConstraint(rows(copies, out=-1.0), -np.inf, pass_),
            optimize.LinearConstraint(rows(copies - again, back=-1.0), -np.inf, 2 * pass_),
        ]
    whole = np.concatenate([np.ones(2 * count), [0, 0]])
    scaled = np.concatenate([prices / unit, np.zeros(count), [0.0, 0.0] if host is None else [1.0, 1.0]])

    def least(objective: np.ndarray, *more: optimize.LinearConstraint) -> optimize.OptimizeResult:
        bounds = optimize.Bounds(0, np.inf)
        return optimize.milp(objective, integrality=whole, bounds=bounds, constraints=[*constraints, *more])

    found = least(scaled)
    if not found.success:
        return None
    # Among solutions of equal time, save most on the device: that recomputes the fewest elementwise operations.
    kept = np.concatenate([-sizes / scale, np.zeros(count), [0.0, 0.0]])
    found = least(kept, optimize.LinearConstraint(scaled[None], -np.inf, found.fun + 1e-6))
    numbers = {pair: round(x) for pair, x in zip(pairs, found.x[:count], strict=True)}
    return [[(name, numbers[s, name]) for name in layer if numbers[s, name]] for s in range(len(segments))]


def format_policies(model: DecoderConfig, counts: Sequence[Sequence[tuple[str, int]]]) -> str:
    """``model.remat`` string of the policies: "full=3,none=5", or the single name that all layers have."""
    rows = [(name, n * len(g)) for (g, _), row in zip(model.segments, counts, strict=True) for name, n in row]
    runs = [(name, sum(n for _, n in run)) for name, run in itertools.groupby(rows, key=lambda row: row[0])]
    return runs[0][0] if len(runs) == 1 else ",".join(f"{name}={n}" for name, n in runs)
