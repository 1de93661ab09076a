"""Collectives of a step compiled for GPUs and TPUs: they send what the plan's formula says, and nothing else."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

from jaxllm.compiler.aot import CompileReport
from jaxllm.config import to_dict
from jaxllm.models import MoeConfig, functional
from jaxllm.parallel.collective_traffic import expected_collectives
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.train import RunConfig
from jaxllm.train.compile_step import compile_for
from jaxllm.train.run import fitting_mesh
from sharding.isolate import run_isolated
from sharding.topology import Topology
from tests import tiny
from tests.proofs.harness import proof

PLANS: dict[str, tuple[str, dict[str, Any], int]] = {
    "data": ("data=8", {}, 1),
    "ZeRO-3": ("fsdp=8", {}, 1),
    "ZeRO-3, two micro-batches": ("fsdp=8", {}, 2),
    "ZeRO-2": ("fsdp=8", {"zero": 2}, 1),
    "ZeRO-2, two micro-batches": ("fsdp=8", {"zero": 2}, 2),
    "ZeRO-1, two micro-batches": ("fsdp=8", {"zero": 1}, 2),
    "hybrid": ("data=2,fsdp=4", {}, 1),
    "hybrid, ZeRO-1": ("data=2,fsdp=4", {"zero": 1}, 1),
    "tensor": ("tensor=8", {}, 1),
    "tensor and sequence": ("tensor=8", {"sequence": True}, 1),
    "ZeRO-3 and tensor": ("fsdp=4,tensor=2", {}, 1),
    "ring": ("context=8", {}, 1),
    "gathered keys": ("context=8", {"context": "all_gather"}, 1),
    "Ulysses": ("ulysses=8", {}, 1),
    "Ulysses in a ring": ("context=4,ulysses=2", {}, 1),
    "expert": ("expert=8", {}, 1),
}
"""Mesh, plan, micro-batches."""
FOLDED: dict[str, tuple[str, dict[str, Any], int]] = {
    "experts over fsdp": ("fsdp=8", {"experts": "expert=8"}, 1),
    "experts over fsdp, two replicas": ("data=2,fsdp=4", {"experts": "expert=4"}, 1),
    "experts over two axes": ("fsdp=4,expert=2", {"experts": "expert=8"}, 1),
    "experts over two axes, ZeRO-1, two micro-batches": ("data=2,fsdp=4", {"experts": "expert=8", "zero": 1}, 2),
}
REFOLDED: dict[str, tuple[str, dict[str, Any], int]] = {
    "experts over fsdp and tensor": ("fsdp=4,tensor=2", {"experts": "expert=8"}, 1),
    "experts over fsdp and tensor, sequence": ("fsdp=4,tensor=2", {"experts": "expert=8", "sequence": True}, 1),
    "experts over fsdp and tensor, ZeRO-2, two micro-batches": (
        "fsdp=4,tensor=2",
        {"experts": "expert=8", "sequence": True, "zero": 2},
        2,
    ),
    "experts over fsdp and tensor, two replicas": ("data=2,fsdp=2,tensor=2", {"experts": "expert=4"}, 1),
    "experts, whole on every device": ("fsdp=4,tensor=2", {"experts": "expert=1", "sequence": True}, 1),
    "experts over a ring": ("context=8", {"experts": "expert=8"}, 1),
    "experts over a ring and tensor": ("context=4,tensor=2", {"experts": "expert=8"}, 1),
    "experts over Ulysses": ("ulysses=8", {"experts": "expert=8"}, 1),
    "experts, their width over tensor": ("fsdp=4,tensor=2", {"experts": "expert=4,tensor=2"}, 1),
    "experts, their width over tensor, sequence": (
        "fsdp=4,tensor=2",
        {"experts": "expert=4,tensor=2", "sequence": True},
        1,
    ),
    "experts, their width over what splits rows": ("fsdp=4,expert=2", {"experts": "expert=4,tensor=2"}, 1),
    "experts, their width over a ring": ("fsdp=2,context=4", {"experts": "expert=2,tensor=4"}, 1),
    "experts, their width over rows and tensor": (
        "fsdp=2,expert=2,tensor=2",
        {"experts": "expert=2,tensor=4"},
        1,
    ),
}
AROUND = {"products in a ring": ("tensor=8", {"sequence": True, "overlap": "ring"}, 1)}
BUFFERS = {"expert, with a capacity": ("expert=8", {}, 1)}
GPUS, TPUS = "h100:1x8", "v6e:2x4"
OPTIONS = ("xla_gpu_enable_while_loop_double_buffering=", "xla_gpu_enable_pipelined_all_gather=")
"""Left to the compiler: two layers in a turn of the loop hide from it that a recomputed sum is not needed."""
SMALL = 512
"""Bytes of collectives that no formula has: the loss, norms, counts of tokens."""


IN_KERNELS = ("collective-permute",)
"""On TPUs keys and values go around the ring inside its kernel, whose copies no text shows."""


def run_of(name: str) -> RunConfig:
    """Every dimension is whole tiles of a TPU also when split; weights, activations and keys differ in size."""
    mesh, plan, accumulate = {**PLANS, **AROUND, **BUFFERS, **FOLDED, **REFOLDED}[name]
    model = tiny.decoder(
        dtype="float32", embed_dim=256, heads=8, kv_heads=8, head_dim=128, mlp=512, vocab_size=2048, layers=3,
        tied=False, remat="full",
    )  # fmt: skip
    if name.startswith("expert"):
        moe = MoeConfig(16, 2, 256, capacity=1.25 if "capacity" in name else None)
        model = dataclasses.replace(model, pattern=(dataclasses.replace(model.pattern[0], mlp=moe),))
    run = RunConfig(
        name=name,
        model=dataclasses.replace(model, dtype="bfloat16"),
        mesh=mesh,
        parallel=ParallelConfig(**plan),
        accumulate=accumulate,
        compiler_options=OPTIONS,
    )
    # Compilers choose where a router's gradient is summed over tensor: longer rows make it the smaller part.
    data = dataclasses.replace(run.data, batch_size=8 * accumulate, seq_len=2048 if name in REFOLDED else 1024)
    return dataclasses.replace(run, data=data)


def wanted(run: RunConfig, num_devices: int) -> Counter[tuple[str, int]]:
    """Bytes by kind and number of devices, by formula."""
    model = functional(run.model, run.parallel.rules())
    mesh = fitting_mesh(run, model, num_devices).abstract()
    found: Counter[tuple[str, int]] = Counter()
    for one in expected_collectives(
        model, mesh, run.parallel, rows=run.data.batch_size, seq_len=run.data.seq_len, accumulate=run.accumulate
    ):
        found[one.kind, math.prod(mesh.shape[axis] for axis in one.axes)] += one.bytes * one.count
    return found


def difference(run: RunConfig, report: CompileReport) -> float:
    """Between wanted and sent: the largest of a kind and a number of devices, as a part of all bytes."""
    around = run.parallel.overlap == "ring"
    unseen = IN_KERNELS if Topology.parse(report.topology).platform == "tpu" and not around else ()
    want, got = wanted(run, report.num_devices), Counter()
    for one in report.collectives:
        if one.total_bytes > SMALL:
            got[one.kind, one.group_size] += one.total_bytes
    rows = [(*key, want[key], got[key]) for key in sorted({*want, *got}) if key[0] not in unseen]
    print(f"\n{run.name}: " + ", ".join(f"{kind} over {n}: {a} wanted, {b} sent" for kind, n, a, b in rows))
    return max(abs(a - b) for _, _, a, b in rows) / sum(want.values())


@proof("parallelism", cases=[(name, on) for on in (GPUS, TPUS) for name in PLANS], sample=1, bound=1e-3)
def traffic(case: tuple[str, str]) -> float:
    """Bytes of each kind over each number of devices.

    Gains and biases may be summed at another place than the formula has it, which is the difference there is.
    """
    name, on = case
    run = run_of(name)
    return difference(run, compile_for(run, on))


@proof("parallelism", cases=(GPUS, TPUS), sample=1, bound=1e-3)
def traffic_of_products_in_a_ring(on: str) -> float:
    """The same for collective matmuls."""
    run = run_of(*AROUND)
    return difference(run, compile_for(run, on))


@proof("parallelism", cases=[(name, on) for on in (GPUS, TPUS) for name in FOLDED], sample=1, bound=1e-3)
def traffic_of_folded_experts(case: tuple[str, str]) -> float:
    """The same for experts that factor the devices which split rows in another way."""
    name, on = case
    run = run_of(name)
    return difference(run, compile_for(run, on))


@proof("parallelism", cases=[(name, on) for on in (GPUS, TPUS) for name in REFOLDED], sample=1, bound=1e-3)
def traffic_of_experts_over_all_axes(case: tuple[str, str]) -> float:
    """The same for experts folded over ``tensor`` and what splits sequences, and for their width."""
    name, on = case
    run = run_of(name)
    return difference(run, compile_for(run, on))


@proof("parallelism", cases=(GPUS, TPUS), sample=1, bound=1e-3)
def traffic_of_experts_with_a_capacity(on: str) -> float:
    """The same for experts whose buffers have a fixed size."""
    run = run_of(*BUFFERS)
    return difference(run, compile_for(run, on))


@proof("parallelism", cases=(TPUS,), sample=1, bound=0.15)
def products_run_beside_copies(on: str) -> float:
    """Share of a ring's copies that have no matmul between their start and their end."""
    found = run_isolated("tests.parallel.beside:copies", on, {"config": to_dict(run_of(*AROUND))})
    print(found)
    assert found["all"] >= 7  # a ring of eight
    return 1 - found["beside"] / found["all"]
