"""CO2: the mean of a round is sent in pieces beside the next round, and applied a round late."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm.train import train
from jaxllm.train.outer.config import OuterConfig
from jaxllm.train.outer.outer_step import sent_bytes
from jaxllm.train.outer.replicas import REPLICA_PARAMS
from jaxllm.train.step.step_builder import init_run_state
from sharding import shardings_of
from tests import quick, tiny
from tests.train import runs
from tests.train.outer_runs import batch_at, compiled_traffic, float32, parts_of, run_of, trained

CO2 = OuterConfig("co2", every=2, rate=0.8, momentum=0.6, clip=0.05)


def norm(tree: Any) -> float:
    return float(np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(tree))))


def reference(rounds: int) -> Any:
    """Common parameters after so many rounds: local steps by replicas without outer step, the rest in NumPy."""
    run = run_of("replica=2,fsdp=2", dataclasses.replace(CO2, kind="diloco", every=100, clip=0.0), steps=2 * rounds)
    model, transform, mesh, abstract, step = parts_of(run)
    x = quick.params(run.model)
    momentum = jax.tree.map(np.zeros_like, x)
    pending = momentum
    clipped = 0
    with jax.set_mesh(mesh):
        jitted = quick.jit(step, out_shardings=(shardings_of(abstract), None))
        state = init_run_state(run, model, transform, mesh, abstract, jax.device_put(x, shardings_of(abstract.params)))
        there = jax.NamedSharding(mesh, model.rules.spec(("batch", "seq"), mesh))
        for number in range(2 * rounds):
            state, _ = jitted(state, jax.device_put(batch_at(number), there))
            if number % 2 == 0:
                continue
            mean = jax.tree.map(lambda d: d.mean(0) if d.ndim else d, pending)
            size = norm(mean)
            gap = 1 + (0.8 * norm(momentum) / size if size else 0)
            momentum = jax.tree.map(lambda m, d, gap=gap: 0.6 * m + d / gap, momentum, mean)
            if (length := norm(momentum)) > 0.05:
                clipped += 1
                momentum = jax.tree.map(lambda m, length=length: m * 0.05 / length, momentum)
            own = jax.device_get(state.extras[REPLICA_PARAMS])
            pending = jax.tree.map(lambda p, q: p[None] - q, x, own)
            x = jax.tree.map(lambda p, m: p - 0.8 * m, x, momentum)
            rows = jax.tree.map(lambda p: np.stack([p] * 2), x)
            placed = jax.device_put(rows, shardings_of(abstract.extras[REPLICA_PARAMS]))
            state = dataclasses.replace(state, extras={**state.extras, REPLICA_PARAMS: placed})
    assert clipped
    return x


def co2_error(rounds: int) -> float:
    """Error of the movement of the common parameters against ``reference``."""
    state = trained(run_of("replica=2,fsdp=2", CO2, steps=2 * rounds)).state
    start, want = quick.params(run_of("dp", OuterConfig()).model), reference(rounds)
    moved = [jax.tree.map(lambda p, q: p - q, jax.device_get(x), start) for x in (state.params, want)]
    assert norm(moved[1]) > 0.03
    return tiny.leaf_error(*moved)


@pytest.mark.drawn(0.5)
def test_the_mean_of_a_round_is_applied_a_round_late(float64):
    assert co2_error(3) < 1e-9


def dependent(jaxpr: Any, sources: set[Any]) -> set[Any]:
    """Variables that depend on ``sources`` in a jaxpr, one equation at a time."""
    found = set(sources)
    for equation in jaxpr.eqns:
        if any(not hasattr(one, "val") and one in found for one in equation.invars):
            found |= set(equation.outvars)
    return found


def has(jaxpr: Any, name: str) -> bool:
    """Whether a jaxpr, or one inside it, has a primitive."""
    return f" {name}" in str(jaxpr)


def test_no_local_step_waits_for_what_is_sent():
    """The equation with the local step takes nothing that depends on the one with the all-reduce, and conversely."""
    run = float32(run_of("replica=2,fsdp=2", CO2))
    model, _, mesh, abstract, step = parts_of(run)
    there = jax.NamedSharding(mesh, model.rules.spec(("batch", "seq"), mesh))
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there), batch_at(0))
    with jax.set_mesh(mesh):
        jaxpr = jax.make_jaxpr(step)(abstract, batch).jaxpr
    maps = [one for one in jaxpr.eqns if one.primitive.name == "shard_map"]
    stepping, sending = (
        next(one for one in maps if has(one.params["jaxpr"], "dot_general") == it) for it in (True, False)
    )
    assert has(sending.params["jaxpr"], "psum")
    assert len(maps) == 2
    for first, second in ((sending, stepping), (stepping, sending)):
        waiting = dependent(jaxpr, set(first.outvars))
        assert not any(not hasattr(one, "val") and one in waiting for one in second.invars)


@pytest.mark.drawn(0.5)
def test_a_step_sends_one_piece_and_the_outer_step_nothing():
    run = float32(run_of("replica=2,fsdp=2", dataclasses.replace(CO2, every=4)))
    _, inside, outer = compiled_traffic(run)
    params = parts_of(run)[3].params
    pieces = sum(4 * -(-math.prod(one.sharding.shard_shape(one.shape)) // 4) for one in jax.tree.leaves(params))
    assert (inside, outer) == (pieces, 0)
    assert sent_bytes(run.outer, params, 2) == 4 * pieces


@pytest.mark.drawn(0.5)
def test_a_run_stopped_inside_a_round_resumes_bitwise(tmp_path):
    fields: dict[str, Any] = {"mesh": "replica=2,fsdp=4", "outer": dataclasses.replace(CO2, every=3)}
    with runs.shared_programs():
        whole = train(runs.run_config(tmp_path, name="whole", **fields))
        directory = runs.stopped_at(tmp_path, 5, name="stopped", **fields)
        again = train(runs.run_config(tmp_path, name="stopped", **fields))
    assert runs.losses(directory) == runs.losses(whole.directory)
    assert again.evaluation == whole.evaluation
