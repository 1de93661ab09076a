"""Replicas with outer steps, and compressed gradients: by definition, by the bytes of programs, and resumed."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from jaxllm.train import train
from jaxllm.train.compile_step import compile_for
from jaxllm.train.outer.compressed_gradients import GradsConfig
from jaxllm.train.outer.config import OuterConfig
from jaxllm.train.outer.int_values import Int2Blocks, Int8Blocks
from jaxllm.train.outer.outer_step import sent_bytes
from jaxllm.train.outer.top_k import TopK
from tests import tiny
from tests.proofs.harness import proof
from tests.train import runs
from tests.train.outer_runs import float32, parallel_error, parts_of, run_of
from tests.train.test_co2 import CO2, co2_error
from tests.train.test_compressed_gradients import error_of
from tests.train.test_outer import AVERAGE, momentum_error

MESHES = ("fsdp=4", "fsdp=2,tensor=2", "data=2,fsdp=2", "tensor=4", "context=2,fsdp=2")


@proof("outer", cases=[(kind, mesh) for kind in ("", "topk:1") for mesh in MESHES], sample=1, float64=True, bound=1e-10)
def every_step_is_data_parallelism(case: tuple[str, str]) -> float:
    """An outer step after every step, at rate 1 without momentum: losses and parameters of data parallelism."""
    compress, mesh = case
    return parallel_error(dataclasses.replace(AVERAGE, compress=compress), mesh)


@proof("outer", cases=["diloco", "co2"], sample=1, float64=True, bound=1e-9)
def outer_steps_by_definition(kind: str) -> float:
    """Common parameters after rounds, against NumPy on the replicas' own parameters."""
    return momentum_error() if kind == "diloco" else co2_error(5)


DATA = ("data=2,fsdp=2", "data=4", "data=2,tensor=2", "data=2,fsdp=2,tensor=2")


@proof("outer", cases=DATA, sample=1, float64=True, bound=1e-10)
def whole_gradients_are_data_parallelism(mesh: str) -> float:
    """Gradients of which all values are sent, with AdamW and different numbers of targets on every device."""
    return error_of("topk:1", mesh)


@st.composite
def vectors(draw: st.DrawFn) -> tuple[int, int, float]:
    """Seed, size and scale of a vector."""
    return draw(st.integers(0, 2**31)), draw(st.integers(1, 9000)), 10.0 ** draw(st.integers(-8, 4))


@proof("outer", count=400, sample=10, strategy=vectors(), bound={"int8": 1.001, "sum": 1e-5})
def messages(case: tuple[int, int, float]) -> dict[str, float]:
    """Bytes of messages are the formulas'; int8 is within half a step; int2 keeps a vector's sum of magnitudes."""
    seed, size, scale = case
    x = jnp.asarray(np.random.default_rng(seed).normal(size=size) * scale, jnp.float32)
    for one in (Int8Blocks(), Int2Blocks(), TopK(0.02), TopK(0.01, Int8Blocks()), TopK(0.03, Int2Blocks())):
        message = one.encode(x)
        assert sum(part.nbytes for part in message) == one.bytes(size, x.dtype)
        assert one.decode(message, size, x.dtype).shape == (size,)
    eight, two = (np.asarray(one.decode(one.encode(x), size, x.dtype)) for one in (Int8Blocks(), Int2Blocks()))
    blocks = np.abs(np.pad(np.asarray(x), (0, -size % 256)).reshape(-1, 256)).max(1).repeat(256)[:size]
    steps = np.abs(eight - np.asarray(x)) / (blocks / 254)
    total = np.abs(np.asarray(x)).sum()
    return {"int8": float(steps.max()), "sum": float(abs(np.abs(two).sum() / total - 1))}


KINDS: dict[str, OuterConfig] = {
    "diloco": OuterConfig("diloco", every=3),
    "diloco, int8": OuterConfig("diloco", every=3, compress="int8"),
    "sparseloco": OuterConfig("sparseloco", every=3, compress="topk:0.02,int2"),
    "co2": dataclasses.replace(CO2, every=4),
}
WIDE = tiny.decoder(kv_heads=4, layers=3, embed_dim=512, mlp=1024, head_dim=128)
"""So large that messages of a few bytes, which compilers for TPUs pad, are no share of the whole."""


@proof("outer", cases=[(kind, on) for kind in KINDS for on in ("h100:1x8", "v6e:2x4")], sample=1, bound=0.02)
def bytes_between_replicas(case: tuple[str, str]) -> float:
    """Bytes that a compiled step sends between replicas, of the formula's; small messages may be joined or padded."""
    kind, on = case
    run = float32(run_of("replica=2,fsdp=4", KINDS[kind], model=WIDE))
    report = compile_for(run, on)
    found = sum(one.total_bytes * (1 + one.summed) for one in report.collectives if one.group_size == 2)
    params = parts_of(run)[3].params
    # Of an all-reduce of n bytes over two devices a device sends n; the reports count whole arrays of all-gathers.
    want = sent_bytes(run.outer, params, 2) * (1 if kind in ("diloco", "co2") else 2)
    if kind == "co2":
        want //= run.outer.every
    print(f"\n{kind} on {on}: {want} wanted, {found} sent")
    return abs(found - want) / want


@proof(
    "outer", cases=[(kind, stop) for kind in (*KINDS, "powersgd:2", "topk:0.1,int8") for stop in (2, 5, 6, 7)], sample=1
)
def rounds_resume(case: tuple[str, int]) -> None:
    """A run stopped anywhere in a round, resumed in the same process: bitwise the run that was not stopped."""
    kind, stop = case
    fields: dict[str, Any] = {"mesh": "replica=2,fsdp=4", "outer": KINDS[kind]} if kind in KINDS else {
        "mesh": "data=2,fsdp=4", "grads": GradsConfig(kind)
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as made, runs.shared_programs():
        folder = Path(made)
        whole = train(runs.run_config(folder, name="whole", **fields))
        directory = runs.stopped_at(folder, stop, name="stopped", **fields)
        again = train(runs.run_config(folder, name="stopped", **fields))
        assert runs.losses(directory) == runs.losses(whole.directory)
        assert again.evaluation == whole.evaluation
