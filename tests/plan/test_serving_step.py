"""Step-time model of serving: FLOPs and bytes by other formulas and by hand, shards, and error messages."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest

from jaxllm.infer.runner.paged_cache import layer_groups
from jaxllm.models import AttentionConfig, BlockConfig, MlpConfig
from jaxllm.models.functional import VOCABULARY
from jaxllm.plan.formulas.device_work import leaves_of
from jaxllm.plan.formulas.op_roofline import roofline
from jaxllm.plan.formulas.serving_step import BatchWork, ServingStepModel, weight_bytes
from jaxllm.plan.hardware import Cluster
from recipes.deepseek import deepseek_v3
from recipes.llama3 import llama3_8b
from recipes.mixtral import mixtral_8x22b
from sharding import MeshSpec, ShardingError


def model(recipe=llama3_8b, on="h100:1x1", mesh="tensor=1", **fields) -> ServingStepModel:
    return ServingStepModel(recipe().model, Cluster.parse(on), MeshSpec.parse(mesh), **fields)


@pytest.mark.parametrize("recipe", [llama3_8b, deepseek_v3])
def test_flops_are_those_of_the_roofline(recipe):
    """Decode of 64 rows after 511 tokens, and prefill of four rows of 512, by the formulas of ``jaxllm roofline``."""
    made = model(recipe)
    config = made.config
    decode = made.step([BatchWork.of([511] * 64, [1] * 64)], 64, 64)
    ops = roofline(config, "decode", batch=64, seq_len=512, hardware=made.hardware)
    assert decode.flops == pytest.approx(sum(op.flops for op in ops), rel=1e-9)
    prefill = made.step([BatchWork.of([0] * 4, [512] * 4)], 2048, 4)
    ops = roofline(config, "prefill", batch=4, seq_len=512, hardware=made.hardware)
    assert prefill.flops == pytest.approx(sum(op.flops for op in ops), rel=1e-9)


@pytest.mark.parametrize("recipe", [llama3_8b, mixtral_8x22b])
def test_decode_reads_weights_and_cache_once(recipe):
    """Bytes of a decode step at a long context: all weights but the embedding, the KV cache, and little else."""
    made = model(recipe)
    long = 60_000
    step = made.step([BatchWork.of([long - 1] * 32, [1] * 32)], 32, 32)
    table = made.config.vocab_size * made.config.embed_dim * 2
    read = made.device_weight_bytes - table + 32 * long * made.token_bytes
    assert 0 < step.bytes / read - 1 < 0.02


def test_weights_are_split_as_the_serving_mesh_splits_them():
    whole, eighth = model(), model(on="h100:1x8", mesh="tensor=8")
    held = 2 * sum(math.prod(leaf.shape) for leaf in leaves_of(whole.config))
    norms = 2 * sum(math.prod(leaf.shape) for leaf in leaves_of(whole.config) if not leaf.matrix)
    assert whole.device_weight_bytes == held
    assert eighth.device_weight_bytes == (held - norms) / 8 + norms
    assert eighth.token_bytes == whole.token_bytes / 8
    assert model(on="h100:2x8", mesh="tensor=16").token_bytes == whole.token_bytes / 8, "kv heads are repeated"


def test_cache_bytes_are_the_engines():
    for kv in ("auto", "int8"):
        (group,) = layer_groups(dataclasses.replace(llama3_8b().model), kv)
        assert model(kv_dtype=kv).token_bytes == len(group.layers) * 8 * (
            256 * (2 if kv == "auto" else 1) + 8 * (kv == "int8")
        )


def test_packed_weights_are_read_in_their_format():
    """int4 with one scale for 32 values; embedding and head are int8 with a scale for each row."""
    assert weight_bytes("int4") == pytest.approx(0.5 + 2 / 32, abs=1 / 16)
    plain, packed = model(), model(weights="int4")
    blocks = 2 * sum(
        math.prod(leaf.shape) for leaf in leaves_of(plain.config) if leaf.matrix and "segments" in leaf.name
    )
    rows = sum(leaf.shape[0] for leaf in leaves_of(plain.config) if leaf.name in VOCABULARY)
    assert plain.device_weight_bytes - packed.device_weight_bytes == pytest.approx(
        blocks * (1 - weight_bytes("int4") / 2) + rows * (plain.config.embed_dim - 4)
    )
    work = [BatchWork.of([99], [1])]
    assert packed.step(work, 1, 1).seconds < 0.6 * plain.step(work, 1, 1).seconds


def test_pairs_and_reads_are_counted(rng):
    """Query-key pairs and read tokens of chunks, with and without a window, against loops."""
    starts, counts = rng.integers(0, 40, 20), rng.integers(1, 30, 20)
    batch = BatchWork(starts, counts)
    for window in (None, 1, 7, 33):
        reach = window or 10**9
        pairs = [sum(min(at + 1, reach) for at in range(s, s + n)) for s, n in zip(starts, counts, strict=True)]
        assert batch.pairs(window).tolist() == pairs
        read = [len({k for at in range(s, s + n) for k in range(max(0, at + 1 - reach), at + 1)})
                for s, n in zip(starts, counts, strict=True)]  # fmt: skip
        assert batch.read(window) == sum(read)


def test_a_prompt_in_chunks_has_the_same_pairs():
    whole = BatchWork.of([0], [1000]).pairs(64).sum()
    assert sum(BatchWork.of([at], [125]).pairs(64).sum() for at in range(0, 1000, 125)) == whole


def test_the_bound_flips_at_the_ridge():
    """Matmuls wait for memory in small batches and not in large ones; between, the wait falls with every row."""
    made = model()
    waits = []
    for rows in (1, 64, 128, 256, 512, 1024):
        cost = made._products(float(rows))
        waits.append(cost.memory)
        assert cost.memory + cost.compute >= cost.bytes / made.hardware.bandwidth
    assert all(a > b for a, b in itertools.pairwise(waits) if a)
    assert waits[0] > 0
    assert waits[-1] == 0


def test_collectives_grow_with_the_mesh_and_replicas_do_not_wait():
    one, two = (model(on=f"h100:1x{n}", mesh=f"tensor={n}") for n in (1, 2))
    work = BatchWork.of([99] * 8, [1] * 8)
    assert one.step([work], 8, 8).network == 0
    assert two.step([work], 8, 8).network > 0
    data = model(on="h100:1x2", mesh="data=2")
    assert data.replicas == 2
    short = BatchWork.of([9], [1])
    assert data.step([work, short], 8, 8).seconds == one.step([work], 8, 8).seconds, "the slower replica counts"


def test_experts_are_read_that_are_chosen():
    made = model(mixtral_8x22b, on="h200:1x8", mesh="tensor=8")
    few, many = (made.step([BatchWork.of([99] * n, [1] * n)], n, n).bytes for n in (1, 64))
    assert few < 0.4 * many
    split = model(mixtral_8x22b, on="h200:1x8", mesh="expert=8")
    assert split.replicas == 8
    assert split.step([BatchWork.of([99], [1])] * 8, 1, 1).network > 0


def test_windows_bound_the_cache_that_is_read():
    blocks = tuple(BlockConfig(AttentionConfig(8, 4, 32, window=w), MlpConfig(64)) for w in (16, None))
    config = dataclasses.replace(llama3_8b().model, pattern=blocks, layers=2, embed_dim=256)
    made = ServingStepModel(config, Cluster.parse("h100:1x1"), MeshSpec.parse("tensor=1"))
    near, far = (made.step([BatchWork.of([at], [1])], 1, 1).bytes for at in (100, 1100))
    assert far - near == 1000 * made.token_bytes / 2


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"mesh": "stage=2", "on": "h100:1x2"}, "does not serve over stage"),
        ({"mesh": "tensor=4", "on": "h100:1x2"}, "not of the 2 devices"),
        ({"weights": "int5"}, "Did you mean"),
        ({"mesh": "tensor=3", "on": "h100:1x3"}, "3"),
    ],
)
def test_mistakes_say_what_is_legal(fields, says):
    with pytest.raises((ShardingError, ValueError), match=says):
        model(**fields)


def test_latency_falls_with_devices_at_equal_work():
    work = [BatchWork.of([1000] * 32, [1] * 32)]
    times = [model(on=f"h200:1x{n}", mesh=f"tensor={n}").step(work, 32, 32).seconds for n in (1, 2, 4)]
    assert np.all(np.diff(times) < 0)
