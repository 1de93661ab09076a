"""Outer steps of replicas: DiLoCo, SparseLoCo and compressed messages, by the configuration of a run."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.config import ConfigError
from jaxllm.parallel.sharding_table_view import size
from jaxllm.plan.hardware import Cluster
from jaxllm.plan.layout_search import search
from jaxllm.train import ResumeError, train
from jaxllm.train.outer.compressed_gradients import GradsConfig
from jaxllm.train.outer.compression import parse_compression
from jaxllm.train.outer.config import OuterConfig
from jaxllm.train.outer.int_values import Int2Blocks, Int8Blocks
from jaxllm.train.outer.outer_step import sent_bytes
from jaxllm.train.outer.replicas import OWN, REPLICA, REPLICA_PARAMS
from jaxllm.train.outer.top_k import TopK
from jaxllm.train.records.run_directory import RunDirectory
from jaxllm.train.run_sharding import sharding_table
from tests import quick, tiny
from tests.train import runs
from tests.train.outer_runs import compiled_traffic, float32, parallel_error, parts_of, run_of, trained

AVERAGE = OuterConfig("diloco", every=1, rate=1.0, momentum=0.0)


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize("compress", ["", "topk:1"])
def test_an_outer_step_after_every_step_is_data_parallelism(float64, compress):
    """Where all values are sent, at rate 1 without momentum, for an inner update that is linear in the gradients."""
    assert parallel_error(dataclasses.replace(AVERAGE, compress=compress), steps=3) < 1e-10


def momentum_error() -> float:
    """Error of DiLoCo's outer steps against Nesterov momentum in NumPy, from the replicas' own parameters."""
    outer = OuterConfig("diloco", every=2, rate=0.5, momentum=0.8)
    run = run_of("replica=2,fsdp=2", outer, steps=4)
    # Replicas whose outer step never comes have the same first rounds.
    apart = dataclasses.replace(run, outer=OuterConfig("diloco", every=100))
    local = jax.device_get(trained(apart, 2).state.extras[REPLICA_PARAMS])
    start = quick.params(run.model)
    gap = jax.tree.map(lambda x, own: x - own.mean(0), start, local)
    want = jax.tree.map(lambda x, d: x - 0.5 * (d + 0.8 * d), start, gap)
    state = trained(run, 2).state
    found = jax.device_get(state.params)
    own = jax.device_get(state.extras[REPLICA_PARAMS])
    assert all(
        np.array_equal(x, row) for x, rows in zip(*map(jax.tree.leaves, (found, own)), strict=True) for row in rows
    )
    moved = jax.tree.map(lambda x, y: x - y, want, start)
    return tiny.leaf_error(jax.tree.map(lambda x, y: x - y, found, start), moved)


@pytest.mark.drawn(0.5)
def test_nesterov_momentum_of_pseudo_gradients(float64):
    assert momentum_error() < 1e-10


@pytest.mark.drawn(0.5)
def test_what_is_not_sent_is_kept(float64):
    """After one round, parameters moved by the mean of what was sent, and sent and kept add up to pseudo-gradients."""
    run = run_of("replica=2,fsdp=2", OuterConfig("sparseloco", every=2, compress="topk:0.1,int2"))
    local = jax.device_get(trained(dataclasses.replace(run, outer=OuterConfig("diloco", every=100)), 2).state.extras)
    state = jax.device_get(trained(run, 2).state)
    start = quick.params(run.model)
    kept = state.extras[OWN]["feedback"]
    sent = jax.tree.map(lambda x, own, e: x - own - e, start, local[REPLICA_PARAMS], kept)
    moved = jax.tree.map(lambda x, y: x - y, start, state.params)
    assert tiny.leaf_error(jax.tree.map(lambda s: s.mean(0), sent), moved) < 1e-9
    shares = [np.mean(np.abs(one) > 1e-12) for one in jax.tree.leaves(sent) if one[0].size > 200]
    assert all(0.05 < share < 0.15 for share in shares)


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("compress", ["int8", "topk:0.05,int8", "topk:0.05,int2"])
def test_bytes_between_replicas_are_those_of_the_formula(compress):
    """Packed integers and scales go through the collectives, and nothing goes between replicas inside a round."""
    run = float32(run_of("replica=2,fsdp=2", OuterConfig("diloco", every=3, compress=compress)))
    _, inside, outer = compiled_traffic(run)
    params = parts_of(run)[3].params
    assert inside == 0
    # The walker counts whole arrays: of an all-gather over two devices, half is a device's own.
    whole = sent_bytes(run.outer, params, 2) * 2
    assert outer == whole
    assert outer < 0.5 * 2 * sum(4 * math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("size", [1, 255, 256, 257, 5000])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_compressors_decode_what_they_encode(size, dtype, rng, float64):
    x = jnp.asarray(rng.normal(size=size) * 10.0 ** rng.integers(-6, 3), dtype)
    for compressor in (Int8Blocks(), Int2Blocks(), TopK(0.03), TopK(0.03, Int8Blocks()), TopK(0.03, Int2Blocks())):
        message = compressor.encode(x)
        assert sum(part.nbytes for part in message) == compressor.bytes(size, x.dtype)
        back = np.asarray(compressor.decode(message, size, x.dtype))
        assert (back.dtype, back.shape) == (x.dtype, x.shape)
        if isinstance(compressor, TopK):
            _, chunk, k = compressor.counts(size)
            largest = np.sort(np.abs(np.asarray(x)[:chunk]))[::-1][:k]
            assert np.count_nonzero(back[:chunk]) <= k
            if "Plain" in type(compressor.values).__name__:
                np.testing.assert_array_equal(np.sort(np.abs(back[:chunk]))[::-1][:k], largest)
    eight = Int8Blocks()
    back = np.asarray(eight.decode(eight.encode(x), size, x.dtype))
    for start in range(0, size, eight.block):
        part = np.asarray(x)[start : start + eight.block]
        assert np.abs(part - back[start : start + eight.block]).max() <= np.abs(part).max() * (0.5 / 127 + 1e-6)
    two = Int2Blocks()
    back = np.asarray(two.decode(two.encode(x), size, x.dtype))
    assert np.array_equal(np.sign(back), np.sign(x))
    np.testing.assert_allclose(np.abs(back).sum(), np.abs(np.asarray(x)).sum(), rtol=1e-5)


@pytest.mark.drawn(3)
def test_zeros_stay_zeros():
    for text in ("int8", "int2", "topk:0.5,int2"):
        compressor = parse_compression(text, "x").compressor  # type: ignore[attr-defined]
        zeros = jnp.zeros(300)
        assert not np.asarray(compressor.decode(compressor.encode(zeros), 300, zeros.dtype)).any()


RESUMED = {
    "diloco": OuterConfig("diloco", every=3),
    "sparseloco": OuterConfig("sparseloco", every=3, compress="topk:0.1,int8"),
}


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize("kind", RESUMED)
def test_a_run_stopped_inside_a_round_resumes_bitwise(kind, tmp_path):
    fields = {"mesh": "replica=2,fsdp=2,tensor=2", "outer": RESUMED[kind]}
    with runs.shared_programs():
        whole = train(runs.run_config(tmp_path, name="whole", **fields))
        directory = runs.stopped_at(tmp_path, 5, name="stopped", **fields)
        again = train(runs.run_config(tmp_path, name="stopped", **fields))
        assert again.complete
        assert runs.losses(directory) == runs.losses(whole.directory)
        assert again.evaluation == whole.evaluation
        assert whole.evaluation is not None
        fewer = runs.run_config(tmp_path, name="stopped", **{**fields, "mesh": "replica=4,fsdp=2"})
        with pytest.raises(ResumeError, match=r"trained with 2 replicas.* mesh now has 4; give the mesh replica=2"):
            train(fewer)
    assert RunDirectory(directory).read_metrics()[-1]["heldout_nll"] == whole.evaluation.nll


def test_settings_that_have_no_effect_are_refused():
    legal = [OuterConfig("diloco", rate=1.0), OuterConfig("sparseloco"), OuterConfig("co2", clip=1.0)]
    assert [one.outer_momentum for one in legal] == [0.9, 0.0, 0.5]
    assert [one.error_feedback for one in legal] == [0.0, 0.95, 0.0]
    assert OuterConfig("diloco", compress="topk:0.1").error_feedback == 1.0
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"kind": "none", "compress": "int8"}, "compress is of an outer step"),
        ({"kind": "diloco", "every": 0}, "every = 0"),
        ({"kind": "diloco", "rate": 0.0}, "rate = 0.0"),
        ({"kind": "diloco", "momentum": 1.0}, "momentum = 1.0"),
        ({"kind": "diloco", "clip": 1.0}, "clip = 1.0"),
        ({"kind": "sparseloco", "momentum": 0.9}, "error feedback takes its place"),
        ({"kind": "co2", "compress": "int8"}, "co2"),
        ({"kind": "diloco", "feedback": 0.9}, "all values are sent"),
    )
    for fields, why in refused:
        with pytest.raises(ValueError, match=why):
            OuterConfig(**fields)
    for text in ("topk:2", "topk", "int9", "int8,int2", "topk:x", "int8:3"):
        with pytest.raises(ConfigError, match=r"outer\.compress: give int8"):
            parse_compression(text, "outer.compress")


def test_the_sharding_table_says_what_goes_between_replicas():
    run = float32(run_of("replica=4,fsdp=2", OuterConfig("diloco", every=10, compress="int8")))
    table = sharding_table(run, 8)
    sent = sent_bytes(run.outer, parts_of(run)[3].params, 4)
    assert f"outer step of 4 replicas every 10 steps: a device sends {size(sent)} over replica" in table.remark
    assert all(REPLICA not in one.axes for one in table.collectives)
    compressed = float32(run_of("data=4,fsdp=2", OuterConfig(), grads=GradsConfig("powersgd:1")))
    remark = sharding_table(compressed, 8).remark
    assert re.match(r'gradients over data with grads\.compress = "powersgd:1": a device sends \S+ KiB a step', remark)


def test_layout_search_refuses_what_it_has_no_formula_for():
    for run in (
        run_of("dp", OuterConfig("diloco")),
        run_of("dp", OuterConfig(), grads=GradsConfig("int8")),
    ):
        with pytest.raises(ConfigError, match=r"no formula for (outer\.kind|grads\.compress): leave it out"):
            search(run, Cluster.parse("v6e:2x2"))
