"""Ladder residual: one device's gradients on every mesh, what an all-reduce delays, and what the model loses."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from hypothesis import strategies as st

from jaxllm.compiler import aot, hlo, program_walker
from jaxllm.compiler.timeline import timeline
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MlpConfig, Segments, functional
from jaxllm.optim import ScheduleConfig
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.plan.hardware import Cluster
from jaxllm.plan.timeline_rates import rates_of
from jaxllm.train import RunConfig
from sharding import MeshSpec, abstract_params
from sharding.isolate import run_isolated
from sharding.topology import Topology
from tests import tiny
from tests.proofs.harness import proof
from tests.proofs.policies import reference
from tests.train.test_plans import SMALL, loss_and_grads

MESHES = (
    "tensor=2",
    "tensor=4",
    "data=2,tensor=2",
    "fsdp=2,tensor=2",
    "context=2,tensor=2",
    "fsdp=4",
    "expert=2,tensor=2",
)
FAMILIES: dict[str, dict[str, Any]] = {
    "dense": {"bias": "all"},
    "norms on both sides": {"norms": "sandwich"},
    "mixture": {"moe": (4, 2, 8, True)},
    "latent": {"latent": 8},
}


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, str, str, str, bool]:
    """Seed, mesh, family, residual streams, sequence parallelism."""
    family = draw(st.sampled_from(tuple(FAMILIES)))
    meshes = [
        mesh
        for mesh in MESHES
        if ("expert" not in mesh or family == "mixture") and (family != "latent" or "context" not in mesh)
    ]
    residual = draw(st.sampled_from(["ladder", "plain=1,ladder", "ladder=1,plain=2,ladder"]))
    return draw(st.integers(0, 2**31)), draw(st.sampled_from(meshes)), family, residual, draw(st.booleans())


@proof("overlap", count=40, sample=1, strategy=runs(), float64=True, bound=1e-10)
def ladder_is_one_device(case: tuple[int, str, str, str, bool]) -> float:
    """Loss and gradients of a model with ladder blocks on a mesh, against those of one device."""
    seed, mesh, family, residual, sequence = case
    config = tiny.decoder(**SMALL | {"layers": 4}, **FAMILIES[family], residual=residual)
    batch = tiny.batch(seed, 8, 8, 16, packed=True, padding=True)
    one = loss_and_grads(config, batch, "data=1", ParallelConfig())
    plan = ParallelConfig(sequence=sequence and "tensor" in mesh)
    return tiny.leaf_error(loss_and_grads(config, batch, mesh, plan), one)


LAYERS = 4
WIDE = DecoderConfig(
    vocab_size=32768, embed_dim=4096, layers=LAYERS, tied=False, param_dtype="bfloat16", dtype="bfloat16", unroll=0,
    pattern=(BlockConfig(AttentionConfig(32, 8, 128), MlpConfig(14336)),),
)  # fmt: skip
"""Layers of Llama 3 8B, a program without loops."""


def forward_here(topology: Topology, residual: str) -> dict[str, Any]:
    """The layers' forward pass over all devices as tensor shards: all-reduces that wait for each other, and its times.

    In this process, which must be set up for the topology's compiler.
    """
    model = functional(dataclasses.replace(WIDE, residual=residual))
    spec = MeshSpec.parse(f"tensor={topology.num_devices}")
    mesh = spec.build(topology.devices())
    params = abstract_params(model.abstract(), model.logical_axes(), mesh, model.rules)
    there = jax.NamedSharding(mesh, jax.P())
    x = jax.ShapeDtypeStruct((1, 2048, 4096), jnp.bfloat16, sharding=there)
    positions = jax.ShapeDtypeStruct((1, 2048), jnp.int32, sharding=there)
    run = jax.jit(lambda p, x, at: model.blocks(p, x, at, Segments())[0])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "program.json"
        aot.compile(run, params, x, positions, topology=topology, mesh=mesh, keep=file)
        text, placement = aot.kept(file)
    played = timeline(program_walker.read(text, placement), rates_of(Cluster.parse(topology.name), spec))
    return {
        "chain": longest_chain(text),
        "exposed": sum(played.exposed.values()),
        "hidden": sum(played.hidden.values()),
        "seconds": played.seconds,
    }


def longest_chain(text: str) -> int:
    """All-reduces on the longest path of a program's entry computation."""
    chain: dict[str, int] = {}
    for one in hlo.parse(text).entry.instructions.values():
        before = max((chain.get(name, 0) for name in one.operands), default=0)
        chain[one.name] = before + (one.opcode in ("all-reduce", "all-reduce-start"))
    return max(chain.values())


@proof("overlap", cases=("v6e:2x2", "h100:1x4"), sample=1, bound={"chain": 0.7, "seconds": 1.0})
def ladder_hides_all_reduces(on: str) -> dict[str, float]:
    """Four layers of Llama 3 8B, a prompt of 2,048 tokens: all-reduces that wait for each other, and seconds of the
    timeline, over those of the plain stream.
    """
    plain, ladder = (
        run_isolated(f"{__name__}:{forward_here.__name__}", on, {"residual": kind}) for kind in ("plain", "ladder")
    )
    print(on, plain, ladder)
    assert plain["chain"] == 2 * LAYERS
    return {name: ladder[name] / plain[name] for name in ("chain", "seconds")}


def reference_run(residual: str) -> RunConfig:
    """The reference run with four layers."""
    return dataclasses.replace(
        reference.RUN, name=residual, model=dataclasses.replace(reference.RUN.model, layers=4, residual=residual)
    )


@proof("overlap", cases=(0, 1, 2), sample=1, bound=0.02)
def ladder_trains(seed: int) -> float:
    """Held-out loss of a tiny model with ladder blocks, trained from scratch, over that of the plain one, less 1."""
    plain, ladder = (
        reference.evaluated(run, reference.trained(run, seed)[0].params)
        for run in map(reference_run, ("plain", "ladder"))
    )
    assert plain < 2.5, "the reference learns: bytes alone, by their frequencies, take 3.3"
    return ladder / plain - 1


@proof("overlap", cases=(0, 1, 2), sample=1, bound=0.02)
def plain_becomes_ladder(seed: int) -> float:
    """A plain model whose upper half becomes ladder blocks, fine-tuned for a quarter of its steps: held-out loss over
    that of the plain model, less 1.
    """
    run = reference_run("plain")
    params = reference.trained(run, seed)[0].params
    half = reference_run("plain=2,ladder")
    schedule = ScheduleConfig(kind="cosine", peak=1e-3, warmup=0.1, floor=0.01)
    tuned = dataclasses.replace(half, steps=run.steps // 4, optim=dataclasses.replace(run.optim, schedule=schedule))
    ladder = reference.evaluated(half, reference.trained(tuned, seed + 100, params)[0].params)
    return ladder / reference.evaluated(run, params) - 1
