"""Persistent optimizer state: the resident run, the bits of state that is all streamed, and the fewest moved bytes."""

from __future__ import annotations

import dataclasses
import random
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxllm.models import MoeConfig
from jaxllm.plan.formulas.chunk_plan import Moment, replay
from jaxllm.train import RunConfig, TrainState
from jaxllm.train.host_offload import HostConfig
from jaxllm.train.run import Run
from jaxllm.train.step.step_builder import init_run_state
from tests.optim.kinds import named
from tests.proofs.harness import proof
from tests.train.runs import run_config

STEPS = 5


def trained(config: RunConfig) -> tuple[list[float], TrainState]:
    """Losses and the state after a few steps."""
    run = Run(config)
    step, _ = run.compile_step()
    state = init_run_state(config, run.model, run.optimizer, run.mesh, run.abstract)
    curve = []
    for number in range(STEPS):
        state, metrics = step(state, run.put_batch(run.data.train.batch_at(number)))
        curve.append(float(metrics["loss"]))
    return curve, state


def moments_of_layers(state: TrainState) -> list[jax.Array]:
    """Arrays of the optimizer state of layers, with their shards on devices."""
    found = jax.tree_util.tree_leaves_with_path(state.opt_state)
    return [leaf for path, leaf in found if leaf.ndim and "segments" in jax.tree_util.keystr(path)]


def bytes_of_shard(array: jax.Array) -> int:
    """Bytes that an array takes on one device, or in the host's memory for it."""
    return array.addressable_shards[0].data.nbytes


def farthest(tree: Any, other: Any) -> float:
    """Greatest difference of an array from that of the other tree, relative to its norm."""
    pairs = zip(*(jax.tree.leaves(jax.device_get(one)) for one in (tree, other)), strict=True)
    return max(float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-3)) for a, b in pairs)


@proof("offload", count=24, sample=1, float64=True, bound={"curve": 1e-10, "parameters": 1e-10, "streamed": 1e-12})
def persistent_state_is_resident(seed: int) -> dict[str, float]:
    """Drawn meshes of eight devices, shares, layers, optimizers, micro-batches, with and without experts: losses and
    parameters of five steps with all state on the device; the bits of all state streamed, but for Adafactor, whose
    means a compiler may add in another order; the arrays of the state that are on a device are the largest that fit
    into the share, and no more."""
    rng = random.Random(seed)
    mesh = rng.choice(["fsdp=8", "fsdp=4,context=2", "fsdp=2,tensor=2,data=2", "tensor=2,fsdp=4", "data=8"])
    kind, share = rng.choice(["adamw", "lion", "adafactor", "sgd"]), rng.uniform(0.05, 0.99)
    with tempfile.TemporaryDirectory() as folder:
        made = run_config(Path(folder), mesh=mesh, accumulate=rng.choice([1, 2]), steps=STEPS, batch_size=16)
        block = made.model.pattern[0]
        pattern = (dataclasses.replace(block, mlp=MoeConfig(4, 2, 16)),) if seed % 3 == 0 else (block,)
        model = dataclasses.replace(
            made.model, layers=rng.randint(1, 5), pattern=pattern, dtype="float64", param_dtype="float64"
        )
        config = dataclasses.replace(made, model=model, optim=named(kind, schedule=made.optim.schedule))

        def with_host(host: HostConfig) -> tuple[list[float], TrainState]:
            return trained(dataclasses.replace(config, host=host))

        plain, streamed = with_host(HostConfig()), with_host(HostConfig(optimizer=True))
        curve, state = with_host(HostConfig(optimizer=True, persistent=share))
    if kind != "adafactor":
        assert curve == streamed[0]
        jax.tree.map(
            np.testing.assert_array_equal, *(jax.device_get((s.params, s.opt_state)) for s in (state, streamed[1]))
        )
    arrays = moments_of_layers(state)
    here = sum(bytes_of_shard(x) for x in arrays if x.sharding.memory_kind == "device")
    room = share * sum(map(bytes_of_shard, arrays))
    expected = 0
    for size in sorted(map(bytes_of_shard, arrays), reverse=True):
        expected += size * (expected + size <= room)
    assert here == expected
    assert not any(x.sharding.memory_kind == "device" for x in moments_of_layers(streamed[1]))
    return {
        "curve": float(np.abs(np.array(curve) / np.array(plain[0]) - 1).max()),
        "parameters": farthest(state.params, plain[1].params),
        "streamed": farthest((state.params, state.opt_state), (streamed[1].params, streamed[1].opt_state)),
    }


@proof("offload", count=300, sample=10)
def persistent_state_moves_least(seed: int) -> None:
    """Chunks of state, one a layer, which an update needs in turn, in a device with room for some of them: with one
    place for those that move and the others persistent, an update loads at most one chunk more than the fewest of all
    choices (the chunk that is needed latest leaves), over some steps; by last use, without a trace, it loads all."""
    rng = random.Random(seed)
    layers, steps = rng.randint(2, 40), rng.randint(2, 6)
    room = rng.randint(2, layers)
    update = [Moment(frozenset({n}), 0) for n in range(layers)]
    fewest = sum(one.loads for one in replay(update, 1, room, steps, "latest use")[1:])
    lru = sum(one.loads for one in replay(update, 1, room, steps, "oldest use")[1:])
    persistent = room - 1 if room < layers else layers
    moved = (steps - 1) * (layers - persistent)
    assert fewest <= moved <= fewest + steps - 1
    assert lru == (steps - 1) * layers * (room < layers)
    assert moved < lru or room >= layers
