"""Deployment search: meshes, formats and token budgets that serve a trace best, each judged by simulation.

    found = search(candidates(config, cluster), trace, ServiceObjective(1.0, 0.05), "latency")

Best is the least mean latency or the least energy per token (APEX, arXiv:2411.17651, gives both), the largest rate that
a device can take, or the least price of a token at that rate, among the deployments that meet the objective. Candidates
are simulated in the order of a lower bound, and those whose bound is no better than the best found, or which cannot
meet the objective even for a request that is alone, are not simulated; so the result is that of simulating all. No
bound is known for the goals ``goodput`` and ``cost``, so all are simulated, the most promising by formula first.

What a trace recommends may be owed to that trace: a best deployment is replayed on another one, and is not best if it
fails there. ``smallest`` tries platforms in the order of their price (GenZ, arXiv:2406.01698).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from jaxllm.infer.engine_config import EngineConfig
from jaxllm.infer.streaming.layer_store import units_of
from jaxllm.models import DecoderConfig
from jaxllm.plan.formulas.serving_step import PLAIN
from jaxllm.plan.hardware import Cluster, Hardware
from jaxllm.simulate.deployment import Deployment, DeploymentError
from jaxllm.simulate.power import PowerModel
from jaxllm.simulate.request_trace import RequestTrace
from jaxllm.simulate.simulator import ServiceObjective, rate_curve, simulate
from jaxllm.simulate.steady_state import decode_seconds, largest_rate, prefill_seconds
from sharding import MeshSpec, ShardingError
from sharding.mesh import divisors

Goal = Literal["latency", "energy", "goodput", "cost"]
AT_KNEE: tuple[Goal, ...] = ("goodput", "cost")
"""Goals that are judged at the largest rate that meets the objective."""
LONG_PROMPT = 8192
"""Mean prompt length in tokens from which on prefill is worth splitting over ``context``."""
BUDGETS = (512, 2048, 8192)
SIZES = (1, 2, 4, 8, 16)
"""Numbers of devices of the platforms that are tried where none is named."""


@dataclass(frozen=True)
class PlannedDeployment:
    """Deployment with its simulated figures.

    Attributes:
        deployment: the deployment.
        figures: see ``Simulation.figures``; of the trace at its own rate.
        value: what the search minimises: seconds a request, joules a token, dollars a million tokens, or less than zero
            by the requests a second and device.
        knee: largest rate that meets the objective, for the goals that are judged there.
        replayed: share of the requests of another trace that met the objective; None: not replayed.
    """

    deployment: Deployment
    figures: dict[str, Any]
    value: float
    knee: float | None = None
    replayed: float | None = None

    @property
    def meets(self) -> bool:
        """Whether the objective's share of the requests met it, in a replay too."""
        share = self.figures["slo"]["share"]
        return self.figures["within_slo"] >= share and (self.replayed is None or self.replayed >= share)


@dataclass
class DeploymentSearchResult:
    """Result of a search.

    Attributes:
        best: best deployment that meets the objective; None if none does.
        simulated: deployments that were simulated, best first: those that meet the objective, by value, then the
            others by the share of requests that met it.
        refused: (deployment, reason) of those that cannot serve the model, or cannot meet the objective.
        pruned: number of deployments whose bound is no better than the best.
    """

    simulated: list[PlannedDeployment] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)
    pruned: int = 0

    @property
    def best(self) -> PlannedDeployment | None:
        """Best deployment that meets the objective."""
        return next((one for one in self.simulated if one.meets), None)


def meshes(model: DecoderConfig, devices: int, *, long: bool = False) -> Iterator[MeshSpec]:
    """Serving meshes of engines whose devices divide a number: tensor, stage, expert, and context if it may help.

    Data parallelism is several engines. Stages go with tensor alone, as in the engine.

    Args:
        model: architecture; ``expert`` is searched where it has experts.
        devices: devices of all engines.
        long: prompts are long: ``context`` is searched too.
    """
    experts = max((block.mlp.routed_experts for block in model.blocks), default=0)
    latent = any(block.attention.kv_spec.latent for block in model.blocks)
    for size in divisors(devices):
        for tensor, expert in itertools.product(divisors(size), divisors(size)):
            context, rest = divmod(size, tensor * expert)
            if expert == 1 and context > 1 and not rest and context <= len(units_of(model.segments)):
                yield MeshSpec((("stage", context), *((("tensor", tensor),) if tensor > 1 else ())))
            if rest or (expert > 1 and (not experts or experts % expert)) or (context > 1 and (not long or latent)):
                continue
            axes = (("expert", expert), ("context", context), ("tensor", tensor))
            yield MeshSpec(tuple((name, many) for name, many in axes if many > 1) or (("tensor", 1),))


def candidates(
    model: DecoderConfig,
    cluster: Cluster,
    trace: RequestTrace,
    *,
    weights: Sequence[str] = (PLAIN,),
    kv_dtypes: Sequence[str] = ("auto",),
    budgets: Sequence[int] = BUDGETS,
    max_sequences: int = 256,
    **sizes: Any,
) -> Iterator[Deployment]:
    """Deployments of a model on a cluster: all meshes, formats and token budgets.

    Args:
        weights, kv_dtypes: formats to choose from.
        budgets: token budgets to choose from.
        sizes: further fields of ``EngineConfig``.
    """
    long = float(np.mean([one.prompt for one in trace.requests])) >= LONG_PROMPT or bool(sizes.get("kv_span"))
    for mesh, weight, kv_dtype, budget in itertools.product(
        meshes(model, cluster.devices, long=long), weights, kv_dtypes, budgets
    ):
        config = EngineConfig(
            max_sequences=min(max_sequences, budget), max_batched_tokens=budget, samplers=("plain",),
            kv_dtype=kv_dtype, **{"max_len": trace.longest, **sizes},
        )  # type: ignore[arg-type]  # fmt: skip
        yield Deployment(model, cluster, mesh, config, weight)


def fit(deployment: Deployment) -> str:
    """Reason why a deployment cannot serve; empty if it can."""
    try:
        _ = deployment.spec
    except (DeploymentError, ShardingError, ValueError) as error:
        return str(error).split(". ")[0]
    return ""


def alone(deployment: Deployment, trace: RequestTrace) -> np.ndarray:
    """Lower bounds [N, 2] of TTFT and TPOT of each request: nothing else is served, and nothing waits.

    A decode step is affine in the context, so the mean over a completion is that at its middle.
    """
    at_one, at_many = (decode_seconds(deployment, 1, context) for context in (1, 1 + trace.longest))
    slope = (at_many - at_one) / trace.longest
    known: dict[int, float] = {}
    out = []
    for one in trace.requests:
        fresh = max(1, one.prompt - one.prefix_tokens)
        if fresh not in known:
            known[fresh] = prefill_seconds(deployment, fresh)
        out.append((known[fresh], at_one + slope * max(0.0, one.prompt + one.tokens / 2 - 2)))
    return np.asarray(out)


def lower_bound(
    deployment: Deployment, trace: RequestTrace, slo: ServiceObjective, goal: Goal, bounds: np.ndarray
) -> float:
    """Lower bound of what a search minimises; for a goal of ``AT_KNEE`` an estimate, which only orders candidates."""
    tokens = np.asarray([one.tokens for one in trace.requests])
    if goal in AT_KNEE:
        prompt = round(float(np.mean([one.prompt for one in trace.requests])))
        return -largest_rate(deployment, prompt, round(float(tokens.mean())), slo) * deployment.engines
    if goal == "latency":
        return float((bounds[:, 0] + bounds[:, 1] * (tokens - 1)).mean())
    watts, power = deployment.cluster.hardware.watts, PowerModel()
    if watts is None:
        raise DeploymentError(
            f"no watts are known for {deployment.cluster.hardware.name}: give them in --hardware, or minimise latency."
        )
    # Devices idle at least from the first arrival to the last one and its service alone.
    span = trace.requests[-1].at - trace.requests[0].at + float(bounds[-1, 0])
    return power.idle * watts * deployment.devices * span / float(tokens.sum())


def search(
    deployments: Iterable[Deployment],
    trace: RequestTrace,
    slo: ServiceObjective,
    goal: Goal = "latency",
    *,
    replay: RequestTrace | None = None,
    most: int | None = None,
    prune: bool = True,
    progress: Callable[[PlannedDeployment], None] = lambda one: None,
) -> DeploymentSearchResult:
    """Best deployment for a trace and an objective.

    Args:
        deployments: candidates.
        trace: requests, at the rate that they shall be served at.
        slo: objective.
        goal: mean latency of requests, joules per output token, the largest rate of a device that meets the objective,
            or dollars per million output tokens at that rate.
        replay: other requests, of which the best must meet the objective too.
        most: deployments to simulate at most, those with the lowest bounds; None: as many as the bounds leave.
        prune: leave out those that the bounds rule out; False: simulate all.
        progress: called with each simulated deployment.

    Raises:
        DeploymentError: the goal needs the devices' watts or prices, and they are not known.
        ValueError: the goal is judged at several rates, and the trace has none.
    """
    found, ordered = DeploymentSearchResult(), []
    for deployment in deployments:
        if reason := fit(deployment):
            found.refused.append((deployment.name, reason))
            continue
        bounds = alone(deployment, trace)
        met = float(((bounds[:, 0] <= slo.ttft) & (bounds[:, 1] <= slo.tpot)).mean())
        if prune and met < slo.share:
            found.refused.append((deployment.name, f"even alone, {met:.0%} of the requests meet the objective"))
            continue
        ordered.append((lower_bound(deployment, trace, slo, goal, bounds), len(ordered), deployment))
    ordered.sort()
    least = np.inf
    for number, (bound, _, deployment) in enumerate(ordered):
        no_better = bound >= least and goal not in AT_KNEE
        if prune and (no_better or (most is not None and len(found.simulated) >= most)):
            found.pruned += len(ordered) - number
            break
        one = judge(deployment, trace, slo, goal)
        if replay is not None and one.meets and one.value < least:
            one = replace(one, replayed=simulate(deployment, replay).within(slo))
        found.simulated.append(one)
        progress(one)
        if one.meets:
            least = min(least, one.value)
    found.simulated.sort(key=lambda one: (not one.meets, one.value if one.meets else -one.figures["within_slo"]))
    return found


def judge(deployment: Deployment, trace: RequestTrace, slo: ServiceObjective, goal: Goal) -> PlannedDeployment:
    """Simulates a deployment, at several rates for a goal of ``AT_KNEE``.

    Raises:
        DeploymentError: the goal is cost and the devices have no price.
    """
    if goal not in AT_KNEE:
        figures = simulate(deployment, trace).figures(slo)
        value = figures["latency"]["mean"] if goal == "latency" else figures["joules_per_token"]
        return PlannedDeployment(deployment, figures, float(value))
    per_hour = deployment.dollars_per_hour
    if goal == "cost" and per_hour is None:
        raise DeploymentError(
            f"{deployment.cluster.hardware.name} has no price: give dollars an hour (--price), or maximise goodput."
        )
    knee, _ = rate_curve(lambda asked: simulate(deployment, asked), trace, slo)
    value = -knee / deployment.devices
    if per_hour is not None and goal == "cost":
        tokens = float(np.mean([one.tokens for one in trace.requests]))
        value = per_hour / 3600 / (knee * tokens) * 1e6 if knee else np.inf
    return PlannedDeployment(deployment, simulate(deployment, trace).figures(slo), value, knee)


def platform_order(cluster: Cluster) -> tuple[float, float]:
    """Sort key of platforms: the price of all devices; without prices after those with one, by bandwidth and number."""
    each = cluster.hardware.dollars_per_hour
    size = cluster.devices * cluster.hardware.bandwidth
    return (np.inf, size) if each is None else (each * cluster.devices, size)


def platforms(hardware: Hardware) -> Iterator[Cluster]:
    """Clusters of a device kind of the sizes that are tried where none is named: ``SIZES``."""
    for devices in SIZES:
        if (found := Cluster.sized(hardware, devices)) is not None:
            yield found


def smallest(
    clusters: Sequence[Cluster], find: Callable[[Cluster], DeploymentSearchResult]
) -> tuple[Cluster | None, list[tuple[Cluster, DeploymentSearchResult]]]:
    """First platform, in the order of price, of which some deployment meets the objective; and all that were tried.

    Args:
        clusters: platforms.
        find: searches the deployments of one.
    """
    tried = []
    for cluster in sorted(clusters, key=platform_order):
        tried.append((cluster, find(cluster)))
        if tried[-1][1].best is not None:
            return cluster, tried
    return None, tried
