"""3-level ZeRO and gathers in 8 bits: one device's gradients, bytes of compiled programs, gathers in inner groups."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import strategies as st

from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.train import RunConfig
from jaxllm.train.compile_step import compile_for
from tests import tiny
from tests.proofs.harness import proof
from tests.proofs.outer.two_level import large_groups
from tests.proofs.parallelism import traffic
from tests.train.test_plans import SMALL, loss_and_grads

MESHES = (
    "data=2,local=2,fsdp=2",
    "data=2,fsdp=4",
    "local=4,fsdp=2",
    "data=2,fsdp=2,tensor=2",
    "data=2,local=2,context=2",
)
PLANS: dict[str, tuple[str, dict[str, Any], int]] = {
    "3-level": (MESHES[0], {"zero": "3level"}, 1),
    "3-level, two micro-batches": (MESHES[0], {"zero": "3level"}, 2),
    "3-level, int8": (MESHES[0], {"zero": "3level", "gather": "int8"}, 1),
    "ZeRO-3, int8": ("fsdp=8", {"gather": "int8"}, 1),
    "ZeRO-2, int8": ("fsdp=8", {"zero": 2, "gather": "int8"}, 1),
}
"""Mesh, plan, micro-batches."""


def run_of_plan(name: str) -> RunConfig:
    """Run of a plan, of the model of ``tests.proofs.parallelism.traffic``."""
    mesh, plan, accumulate = PLANS[name]
    run = traffic.run_of("data")
    data = dataclasses.replace(run.data, batch_size=8 * accumulate)
    return dataclasses.replace(
        run, name=name, mesh=mesh, parallel=ParallelConfig(**plan), accumulate=accumulate, data=data
    )


@proof("outer", cases=[(name, on) for on in ("h100:1x8", "v6e:2x4") for name in PLANS], sample=1, bound=1e-3)
def three_level_traffic(case: tuple[str, str]) -> float:
    """Bytes of each kind over each number of devices in compiled steps, by the formulas of 3-level ZeRO and int8."""
    name, on = case
    run = run_of_plan(name)
    return traffic.difference(run, compile_for(run, on))


@proof("outer", cases=["3-level", "3-level, int8"], sample=1)
def three_level_nodes(name: str) -> None:
    """On two nodes of four H100: layers are gathered inside a pair, and once per step over each outer level.

    Of all large collectives only those over data leave a node: an all-gather and a reduce-scatter of parts.
    """
    found = large_groups(run_of_plan(name), "h100:2x4")
    print(found)
    away = {(kind, axes) for kind, axes, spans in found if spans > 1}
    assert away == {("all-gather", ("data",)), ("reduce-scatter", ("data",))}
    assert {axes for kind, axes, _ in found if kind == "all-gather"} == {("data",), ("local",), ("fsdp",)}
    assert not any(kind == "all-reduce" for kind, _, _ in found)


@st.composite
def plans(draw: st.DrawFn) -> tuple[int, str, int]:
    """Seed, mesh and micro-batches."""
    return draw(st.integers(0, 2**31)), draw(st.sampled_from(MESHES)), draw(st.sampled_from([1, 2]))


@proof("outer", count=60, sample=2, strategy=plans(), float64=True, bound=1e-10)
def three_level_parity(case: tuple[int, str, int]) -> float:
    """Loss and gradients with 3-level ZeRO, against those of one device."""
    seed, mesh, accumulate = case
    config = tiny.decoder(**SMALL, bias="all")
    batch = tiny.batch(seed, 16, 8, 16, packed=True, padding=True)
    one = loss_and_grads(config, batch, "data=1", ParallelConfig())
    return tiny.leaf_error(loss_and_grads(config, batch, mesh, ParallelConfig(zero="3level"), accumulate), one)
