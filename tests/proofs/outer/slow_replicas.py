"""Slow replicas (heterogeneous SparseLoCo): stages inside replicas, projected messages, and their bytes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxllm.train.compile_step import compile_for
from jaxllm.train.outer.config import OuterConfig
from tests import tiny
from tests.proofs.harness import proof
from tests.train.outer_runs import LINEAR, parallel_error, run_of, trained
from tests.train.slow_replicas import AVERAGE, MODEL, SGD, definition_error

FULL: dict[str, Any] = {"slow": (1,), "stage_rank": MODEL.embed_dim}
STAGES = ("stage=2", "stage=2,fsdp=2", "stage=2,tensor=2", "stage=4", "stage=2,data=2")


@proof(
    "outer", cases=[(compress, mesh, full) for compress in ("", "topk:1") for mesh in STAGES for full in (False, True)],
    sample=1, float64=True, bound=1e-10,
)  # fmt: skip
def stages_of_replicas_are_data_parallelism(case: tuple[str, str, bool]) -> float:
    """Replicas of several stages with an outer step after every step, at rate 1 without momentum, all values sent:
    losses and parameters of data parallelism over the same stages; with projections of full rank too."""
    compress, mesh, full = case
    return parallel_error(dataclasses.replace(AVERAGE, compress=compress, **(FULL if full else {})), mesh, model=MODEL)


KINDS: dict[str, OuterConfig] = {
    "diloco": OuterConfig("diloco", every=2),
    "diloco, all values through top-k": OuterConfig("diloco", every=2, compress="topk:1"),
    "averages of three steps": OuterConfig("diloco", every=3, rate=1.0, momentum=0.0),
    "co2": OuterConfig("co2", every=2),
}
"""Outer steps that do not depend on how parameters are split over a replica's devices."""


@proof("outer", cases=[(kind, mesh) for kind in KINDS for mesh in STAGES], sample=1, float64=True, bound=1e-10)
def rounds_over_stages(case: tuple[str, str]) -> float:
    """Parameters after three rounds, against those of replicas without stages on the same rows."""
    kind, mesh = case
    found, want = (
        trained(run_of(on, KINDS[kind], LINEAR, 6, model=MODEL)) for on in (f"replica=2,{mesh}", "replica=2,fsdp=2")
    )
    return tiny.leaf_error(jax.device_get(found.state.params), jax.device_get(want.state.params))


CUTS = {"1f1b": (2,), "gpipe": (2,), "interleaved": (1, 2, 3), "zb_h1": (2,)}


@proof(
    "outer",
    cases=[
        (rank, schedule, slow, mesh) for rank in (1, 5, 12) for schedule in CUTS for slow in ((0,), (1,), (0, 1))
        for mesh in ("replica=2,stage=2", "replica=2,stage=2,fsdp=2", "replica=2,stage=2,tensor=2")
    ],
    sample=1, float64=True, bound=1e-10,
)  # fmt: skip
def projected_messages_by_definition(case: tuple[int, str, tuple[int, ...], str]) -> float:
    """Parameters after a step: gradients of the model with the projections in it, on the rows of slow replicas."""
    rank, schedule, slow, mesh = case
    return definition_error(rank, schedule, CUTS[schedule], slow, mesh)


WIDE = dataclasses.replace(
    tiny.decoder(kv_heads=4, layers=4, embed_dim=512, mlp=1024, head_dim=128),
    dtype="bfloat16", param_dtype="float32",
)  # fmt: skip


@proof("outer", cases=[(rank, on) for rank in (32, 128) for on in ("h100:1x8", "v6e:2x4")], sample=1, bound=0.0)
def bytes_between_stages(case: tuple[int, str]) -> float:
    """Bytes of each message between stages in compiled steps: whole, and of slow replicas rank / width of it."""
    rank, on = case
    outer = dataclasses.replace(AVERAGE, slow=(1,), stage_rank=rank)
    run = run_of("replica=2,stage=2,fsdp=2", outer, SGD, 1, model=WIDE, accumulate=2)
    found = {one.bytes for one in compile_for(run, on).collectives if one.kind == "collective-permute"}
    whole = max(found)
    assert whole == 1 * 8 * 512 * 2  # rows, positions, width, bytes of a bfloat16
    return float(sum(found) - whole - whole * rank // 512)
