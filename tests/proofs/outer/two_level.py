"""Two-level sums of gradients: the flat sum, with the groups and bytes of the formula in compiled programs."""

from __future__ import annotations

import dataclasses
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from jaxllm.compiler import aot, hlo
from jaxllm.compiler.collectives import CollectiveReader
from jaxllm.compiler.replica_groups import groups
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.train import RunConfig
from jaxllm.train.compile_step import compile_for
from tests import tiny
from tests.proofs.harness import proof
from tests.proofs.parallelism import traffic
from tests.train.test_plans import SMALL, loss_and_grads

MESH = "data=4,local=2"
PLANS: dict[str, tuple[str, dict[str, Any], int]] = {
    "two-level": ("data=2,local=4", {"reduce": "two_level"}, 1),
    "two-level, two micro-batches": ("data=2,local=4", {"reduce": "two_level"}, 2),
    "two-level, ZeRO-1, two micro-batches": ("data=2,local=4", {"reduce": "two_level", "zero": 1}, 2),
    "two-level, ZeRO-2, hybrid": ("data=2,local=2,fsdp=2", {"reduce": "two_level", "zero": 2}, 1),
    "flat": ("data=2,local=4", {"reduce": "flat"}, 1),
    "flat, ZeRO-1, two micro-batches": ("data=2,local=4", {"reduce": "flat", "zero": 1}, 2),
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


def large_groups(run: RunConfig, on: str) -> Counter[tuple[str, tuple[str, ...], int]]:
    """Kinds of a compiled step's collectives of more than 64 KiB, their mesh axes, and the nodes that a group spans."""
    found: Counter[tuple[str, tuple[str, ...], int]] = Counter()
    with tempfile.TemporaryDirectory() as made:
        file = Path(made) / "step"
        compile_for(run, on, keep=file)
        text, placement = aot.kept(file)
    module = hlo.parse(text)
    reader = CollectiveReader(module)
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            for key, attributes in reader.sent(instruction, computation):
                if key[2] > 2**16:
                    found[key[0], *placement.joins(groups(attributes, len(placement.islands)))] += 1
    return found


@proof("outer", cases=[(name, on) for on in ("h100:1x8", "v6e:2x4") for name in PLANS], sample=1, bound=1e-3)
def two_level_traffic(case: tuple[str, str]) -> float:
    """Bytes of each kind over each number of devices in compiled steps, by the formula of two-level sums."""
    name, on = case
    run = run_of_plan(name)
    return traffic.difference(run, compile_for(run, on))


@proof("outer", cases=["data=8", "data=4,fsdp=2"], sample=1)
def two_level_nodes(mesh: str) -> None:
    """On two nodes of four H100, of which the mesh does not know: groups of local in a node, of data over both."""
    run = dataclasses.replace(run_of_plan("two-level"), mesh=mesh)
    found = large_groups(run, "h100:2x4")
    print(found)
    assert {(axes, spans) for _, axes, spans in found if "fsdp" not in axes} == {(("local",), 1), (("data",), 2)}
    assert {kind for kind, axes, _ in found if axes == ("data",)} == {"all-reduce"}


@st.composite
def sums(draw: st.DrawFn) -> tuple[int, str, int, int]:
    """Seed, mesh, ZeRO stage and micro-batches."""
    mesh = draw(st.sampled_from(["data=2,local=4", MESH, "data=2,local=2,fsdp=2", "data=2,local=2,tensor=2"]))
    return draw(st.integers(0, 2**31)), mesh, draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2]))


@proof("outer", count=60, sample=2, strategy=sums(), float64=True, bound=1e-12)
def two_level_is_flat(case: tuple[int, str, int, int]) -> float:
    """Loss and gradients with two-level sums, against those with one all-reduce."""
    seed, mesh, zero, accumulate = case
    config = tiny.decoder(**SMALL, bias="all")
    batch = tiny.batch(seed, 16, 8, 16, packed=True, padding=True)
    flat, two = (
        loss_and_grads(config, batch, mesh, ParallelConfig(reduce=reduce, zero=zero), accumulate)  # type: ignore[arg-type]
        for reduce in ("flat", "two_level")
    )
    return tiny.leaf_error(two, flat)
