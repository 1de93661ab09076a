"""Peers that come and go fill a fixed global batch: synchronous SGD on the rows that they added."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.config import ConfigError
from jaxllm.data import Batch, DataConfig
from jaxllm.train import train
from jaxllm.train.outer.config import OuterConfig
from jaxllm.train.outer.dedloc import PeersConfig
from jaxllm.train.run_sharding import sharding_table
from jaxllm.train.step.step_builder import init_run_state
from sharding import MeshSpec, shardings_of
from tests import quick, tiny
from tests.train import runs
from tests.train.outer_runs import ADAMW, CONFIG, LENGTH, ROWS, parts_of, run_of


def rounds_of(run, batches):
    """States and metrics of a run's steps on given batches."""
    model, transform, mesh, abstract, step = parts_of(run)
    jitted, found = quick.jit(step, out_shardings=(shardings_of(abstract), None)), []
    with jax.set_mesh(mesh):
        params = jax.device_put(quick.params(run.model), shardings_of(abstract.params))
        state = init_run_state(run, model, transform, mesh, abstract, params)
        there = jax.NamedSharding(mesh, model.rules.spec(("batch", "seq"), mesh))
        for batch in batches:
            state, metrics = jitted(state, jax.device_put(batch, there))
            found.append((state, jax.device_get(metrics)))
    return found


def batch_of(number: int) -> Batch:
    """Rows with different numbers of targets."""
    return tiny.batch(number, ROWS, LENGTH, CONFIG.vocab_size, packed=True)


def synchronous_error(mesh: str, peers: PeersConfig, rounds: int, seed: int = 0) -> float:
    """Error of parameters after peers filled batches, against a run of one device on the rows that were added."""
    run = dataclasses.replace(run_of(mesh, OuterConfig(), ADAMW, rounds, peers=peers), seed=seed)
    found = rounds_of(run, [batch_of(number) for number in range(rounds)])
    count = dict(MeshSpec.parse(mesh).axes)["data"]
    key, each = found[0][0].rng, ROWS // count
    batches: list[list[Batch]] = [[]]
    for number, (_, metrics) in enumerate(found):
        present = np.repeat(np.asarray(peers.present(key, jnp.asarray(number), count)), each)
        assert int(metrics["peers_present"]) * each == present.sum()
        batches[-1].append(jax.tree.map(lambda x, present=present: x[present], batch_of(number)))
        filled = sum(len(part.tokens) for part in batches[-1]) >= peers.batch
        assert bool(metrics["batch_filled"]) == filled
        if filled:
            batches.append([])
    assert len(batches) > 2, "two batches were filled"
    together = [jax.tree.map(lambda *parts: np.concatenate(parts), *one) for one in batches[:-1]]
    largest = max(len(one.tokens) for one in together)

    def padded(batch: Batch) -> Batch:
        room = largest - len(batch.tokens)
        rows = jax.tree.map(lambda x: np.concatenate([x, np.repeat(x[:1], room, axis=0)]), batch)
        rows.targets[len(batch.tokens) :] = -1
        return rows

    one = run_of("data=1", OuterConfig(), ADAMW, rounds)
    one = dataclasses.replace(one, data=DataConfig(batch_size=largest, seq_len=LENGTH))
    want = rounds_of(one, [padded(batch) for batch in together])[-1][0]
    return tiny.leaf_error(jax.device_get(found[-1][0].params), jax.device_get(want.params))


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize(
    ("mesh", "peers"),
    [
        ("data=4", PeersConfig(8, away=0.5)),
        ("data=2,fsdp=2", PeersConfig(12, away=0.5, steps=3)),
        ("data=4", PeersConfig(20)),
    ],
)
def test_parameters_are_those_of_synchronous_batches(mesh, peers, float64):
    assert synchronous_error(mesh, peers, 7) < 1e-10


@pytest.mark.drawn(0.5)
def test_a_run_resumes_bitwise_inside_a_batch(tmp_path):
    fields = {"mesh": "data=4,fsdp=2", "peers": PeersConfig(40, away=0.25, steps=2)}
    with runs.shared_programs():
        whole = train(runs.run_config(tmp_path, name="whole", **fields))
        directory = runs.stopped_at(tmp_path, 5, name="stopped", **fields)
        again = train(runs.run_config(tmp_path, name="stopped", **fields))
    assert runs.losses(directory) == runs.losses(whole.directory)
    assert again.evaluation == whole.evaluation


def test_what_is_no_batch_or_has_no_peers_is_refused():
    for fields, said in (
        ({"batch": -1}, "or 0 for"),
        ({"batch": 8, "away": 1.0}, "below 1"),
        ({"away": 0.5}, "to fill"),
    ):
        with pytest.raises(ValueError, match=said):
            PeersConfig(**fields)
    with pytest.raises(ConfigError, match=r"peers\.batch"):
        sharding_table(run_of("fsdp=4", OuterConfig(), peers=PeersConfig(16)), 4)
    assert [int(PeersConfig(8, away=0.9).present(jax.random.key(0), jnp.asarray(n), 4).sum()) for n in range(3)] == [
        1
    ] * 3
