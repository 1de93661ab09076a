"""Remat solver under memory budgets of the device and of its host, measured by the TPU compiler."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

from jaxllm.cli.memory_budget import MemoryBudget, within_budget
from jaxllm.data import DataConfig
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MlpConfig
from jaxllm.plan.graphs.block_graph import block_graphs, value_bytes
from jaxllm.plan.graphs.block_placement import placed_policies
from jaxllm.plan.hardware import Cluster
from jaxllm.plan.persistent_share import modelled
from jaxllm.plan.remat_solver import HOSTED, NAMED, HostTier, StepBytes, solve
from jaxllm.train import RunConfig
from jaxllm.train.compile_step import compile_for
from jaxllm.train.host_offload import HostConfig, persistent_arrays
from jaxllm.train.model_flops import hardware_flops_per_token, recomputed_flops, train_flops_per_token
from sharding import MeshSpec
from tests.plan.test_host_tier import fastest_is_found
from tests.proofs.harness import proof

ON, DEVICES = "v5e:2x2", 4
LAYERS, WIDTH, ROWS, LENGTH = 24, 512, 8, 1024


def config(rows: int = ROWS, length: int = LENGTH) -> RunConfig:
    """A model whose activations are most of what a step takes."""
    block = BlockConfig(AttentionConfig(4, 4, WIDTH // 4), MlpConfig(4 * WIDTH))
    model = DecoderConfig(vocab_size=1024, embed_dim=WIDTH, layers=LAYERS, pattern=(block,), dtype="bfloat16")
    return RunConfig(model=model, data=DataConfig(batch_size=rows, seq_len=length), mesh=f"fsdp={DEVICES}", steps=10)


@functools.cache
def measure(remat: str, rows: int = ROWS, length: int = LENGTH) -> StepBytes:
    """Bytes of a device, of all that the step takes, and of the host."""
    run = config(rows, length)
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, remat=remat))
    report = compile_for(run, ON, anyway=True)
    return StepBytes(report.total_bytes, report.host_bytes)


@proof(
    "policies",
    cases=[0.3, 0.5, 0.7, 0.9],
    sample=1,
    bound={"over the budget": 0.0, "left": 0.05, "FLOPs over the best named": 0.0},
)
def solver(share: float) -> dict[str, float]:
    """A budget between the memory of "full" and of "elementwise": it is kept, and used up to 5%.

    Every named policy that fits computes more again.
    """
    least, most = measure("full").device, measure("elementwise").device
    budget = round(least + share * (most - least))
    solved = solve(config(), budget, measure)
    best = min(one.flops for one in solved.named.values() if one.bytes <= budget)
    assert solved.flops < best, "between two named policies a mixture computes less again"
    return {
        "over the budget": max(0.0, solved.bytes / budget - 1),
        "left": 1 - solved.bytes / budget,
        "FLOPs over the best named": max(0.0, solved.flops / best - 1),
    }


@proof("policies", cases=[0.2, 0.4, 0.6], sample=1, bound={"over the budget": 0.0, "computed again": 0.6})
def long_rows_keep_the_results_of_attention(share: float) -> dict[str, float]:
    """Rows of 8,192 tokens, where attention costs more than the matmuls with weights: what the solution computes
    again, over the least that mixtures of policies without sets of values do in as many bytes.
    """
    rows, length = DEVICES, 8192
    run = config(rows, length)
    named = {name: measure(name, rows, length).device for name in NAMED}
    budget = round(named["full"] + share * (named["elementwise"] - named["full"]))
    solved = solve(run, budget, lambda remat: measure(remat, rows, length))
    again = {name: recomputed_flops(name, run.model, run.model.pattern, length) for name in NAMED}
    mixtures = itertools.combinations_with_replacement(NAMED, LAYERS)
    fit = [names for names in mixtures if sum(named[name] for name in names) <= LAYERS * budget]
    least = min(sum(again[name] for name in names) for names in fit)
    more = solved.flops - train_flops_per_token(run.model, length)
    print(f"{share}: {solved.remat}, {solved.bytes / budget:.3f} of the budget")
    return {"over the budget": max(0.0, solved.bytes / budget - 1), "computed again": more / least}


@proof("policies", count=300, sample=20, bound=1e-5)
def placements_are_the_fastest(seed: int) -> float:
    """Time of the solution over that of the fastest of all assignments of policies to layers, less 1, on random costs,
    budgets and links, for models of one kind of layer and of two.
    """
    return fastest_is_found(seed)


@proof(
    "policies",
    cases=[(0.1, 1.0), (0.3, 0.6), (0.5, 0.3), (0.8, 0.3)],
    sample=1,
    bound={"over the budget": 0.0, "left": 0.05, "time over the best named": 0.0},
    counts=("moved",),
)
def solver_with_a_host(case: tuple[float, float]) -> dict[str, float]:
    """Budgets between the least memory of any policy and that of "elementwise", and a part of what all layers would
    take of the host.

    Both budgets are kept, the device's is used up to a twentieth where a matmul is computed again, and no policy for
    all layers that fits is faster by the model of time. How often something is moved to the host is counted.
    """
    share, of_host = case
    least, most = min(measure(name).device for name in (*HOSTED, "full")), measure("elementwise").device
    budget, limit = round(least + share * (most - least)), round(of_host * measure("offload").host)
    host = HostTier.of(config(), Cluster.parse(ON), MeshSpec.parse(config().mesh), limit)
    solved = solve(config(), budget, measure, host)

    def seconds(one: Any) -> float:
        return one.flops * host.seconds_per_flop + one.exposed

    fits = [seconds(one) for one in solved.named.values() if one.bytes <= budget and one.host <= limit]
    whole = hardware_flops_per_token(dataclasses.replace(config().model, remat="elementwise"), LENGTH)
    left = 0.0 if solved.flops <= whole else 1 - solved.bytes / budget
    shares = solved.bytes / budget, solved.chosen.host / limit
    print(f"{case}: {solved.remat}, {shares[0]:.3f} of the device, {shares[1]:.3f} of the host")
    return {
        "over the budget": max(0.0, solved.bytes / budget - 1, solved.chosen.host / limit - 1),
        "left": left,
        "time over the best named": max([0.0, *(seconds(solved.chosen) / one - 1 for one in fits)]),
        "moved": float(solved.chosen.host > 0),
    }


@functools.cache
def measure_run(remat: str, persistent: float) -> StepBytes:
    """Bytes of a step with its optimizer state in host memory, of which a share is persistent."""
    report = compile_for(with_state_on_host(remat, persistent), ON, anyway=True)
    print(f"{remat}, {persistent:g} persistent: {report.total_bytes / 2**20:.1f} MiB, {report.host_bytes / 2**20:.1f}")
    return StepBytes(report.total_bytes, report.host_bytes)


def with_state_on_host(remat: str, persistent: float) -> RunConfig:
    """The run with its optimizer state in host memory."""
    run, host = config(), HostConfig(optimizer=True, persistent=persistent)
    return dataclasses.replace(run, model=dataclasses.replace(run.model, remat=remat), host=host)


def used(took: int, budget: int, beyond: Sequence[float]) -> float:
    """Share of a budget that a plan uses, with the least that faster plans took beyond the sum of their parts.

    A loop more takes memory of its own (docs/train/recomputation.md), so what is left below that makes none faster.

    Args:
        took: bytes of the plan.
        budget: bytes of a device.
        beyond: of each plan that was compiled and is faster by the model of time.
    """
    return (took + max(0.0, min(beyond, default=0.0))) / budget


@proof(
    "policies",
    cases=[0.25, 0.5, 0.75],
    sample=1,
    bound={"over the budget": 0.0, "left": 0.05, "time over the best uniform": 0.0, "time over what fits": 0.0},
)
def persistent_shares(share: float) -> dict[str, float]:
    """Budgets between the memory of "full" with all optimizer state in host memory, and that of "elementwise" with all
    of it on the device: `--within --host` keeps to them and uses them up to 5%, and its step takes less time by the
    plan than any policy for all layers that fits, with all state streamed, and than any plan that was compiled and
    fits. More than 5% is left where it is less than faster plans took beyond the sum of their parts.
    """
    run, cluster, mesh = with_state_on_host("full", 0.0), Cluster.parse(ON), MeshSpec.parse(config().mesh)
    state = 2 * 4 * LAYERS * (16 * WIDTH * WIDTH) // DEVICES
    least, most = measure_run("full", 0.0).device, measure_run("elementwise", 0.0).device + state
    budget, host = round(least + share * (most - least)), 2**31
    compiled = set[tuple[str, float]]()

    def measure(one: RunConfig) -> StepBytes:
        compiled.add((one.model.remat, one.host.persistent))
        return measure_run(one.model.remat, one.host.persistent)

    found = within_budget(run, MemoryBudget(budget, host), measure, (DEVICES, "tpu"), cluster)
    tier, blocks = HostTier.of(run, cluster, mesh, host), block_graphs(run, mesh)
    assert blocks is not None
    widths = value_bytes(blocks)
    streamed = solve(run, budget, lambda name: measure_run(name, 0.0), tier, widths, placed_policies(blocks))
    parts, forward = modelled(run.model, streamed, widths), train_flops_per_token(run.model, LENGTH) / 3

    def stays(persistent: float) -> float:
        """Share of the state that is persistent, by arrays of one layer."""
        sizes = [1] * 8 + [4] * 6
        return sum(sizes[n] for n in persistent_arrays(sizes, persistent)) / sum(sizes)

    def seconds(remat: str, persistent: float) -> float:
        """Of passes, exposed copies of activations, and the state that is not persistent."""
        flops = hardware_flops_per_token(dataclasses.replace(run.model, remat=remat), LENGTH)
        exposed = tier.exposed(measure_run(remat, persistent).host, forward, flops - forward)
        return flops * tier.seconds_per_flop + exposed + (1 - stays(persistent)) * state * tier.seconds_per_byte

    named = [name for name in (*HOSTED, *NAMED) if measure_run(name, 0.0).device <= budget]
    best = min(seconds(name, 0.0) for name in named)
    chosen, took = seconds(found.model.remat, found.host.persistent), measure(found).device
    faster = [(remat, held) for remat, held in compiled if held and seconds(remat, held) < chosen]
    beyond = [measure_run(*one).device - parts(one[0]).device - stays(one[1]) * state for one in faster]
    fits = [seconds(*one) for one in compiled if measure_run(*one).device <= budget]
    print(
        f"{share}: {found.model.remat}, {found.host.persistent:g} persistent, {took / budget:.3f} of the budget; "
        f"faster ones took beyond their parts {', '.join(f'{one / 2**20:.1f} MiB' for one in sorted(beyond)) or '-'}"
    )
    assert found.host.persistent > 0
    return {
        "over the budget": max(0.0, took / budget - 1),
        "left": max(0.0, 1 - used(took, budget, beyond)),
        "time over the best uniform": max(0.0, chosen / best - 1),
        "time over what fits": max(0.0, chosen / min(fits) - 1),
    }
