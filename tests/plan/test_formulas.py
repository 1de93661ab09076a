"""Memory and step time by formula: properties for any model and mesh."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random

import jax
import jax.numpy as jnp
import pytest

from jaxllm.config import ConfigError
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MLAConfig, MlpConfig, MoeConfig
from jaxllm.models.moe.expert_dispatch import dispatch_and_combine, dispatch_within_capacity
from jaxllm.models.moe.expert_exchange import receive_rows
from jaxllm.optim import OptimConfig
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.parallel.pipeline.schedule import OpCosts
from jaxllm.parallel.pipeline.schedule_generators import make
from jaxllm.parallel.pipeline.schedule_table import tabulate
from jaxllm.parallel.sharding_table import device_bytes
from jaxllm.plan.formulas import device_work, memory_estimate, step_time
from jaxllm.plan.formulas.calibration import DEFAULT
from jaxllm.plan.formulas.device_work import DeviceWork
from jaxllm.plan.hardware import Cluster
from jaxllm.plan.layout_search import REMATS, search
from jaxllm.train import RunConfig
from jaxllm.train.model_flops import train_flops_per_token
from jaxllm.train.run_sharding import sharding_table
from pallas_kernels.flash_attention.blockwise import MAX_HEAD_DIM
from recipes.llama3 import llama3_8b
from sharding import MeshSpec
from sharding.topology import Topology
from tests import environment
from tests.optim.kinds import KINDS, named

H100, V6E = Topology.parse("h100:1x8"), Topology.parse("v6e:2x4")


def drawn(trial: int) -> RunConfig:
    """Random run of any kind of model, with sizes that divide over eight devices."""
    rng = random.Random(environment.derive(environment.seed(), "plan", trial))
    heads = rng.choice([8, 16])
    attention = rng.choice(
        [
            AttentionConfig(heads=heads, kv_heads=8, head_dim=rng.choice([64, 128])),
            AttentionConfig(heads=heads, kv_heads=heads, head_dim=64, window=512, qk_norm="head", bias="qkv"),
            MLAConfig(heads=heads, latent=128, q_latent=rng.choice([None, 256])),
        ]
    )
    mlp = rng.choice(
        [MlpConfig(hidden=2048), MlpConfig(hidden=2048, gated=False), MoeConfig(experts=8, top_k=2, hidden=512)]
    )
    model = DecoderConfig(
        vocab_size=rng.choice([8192, 32768]),
        embed_dim=rng.choice([512, 1024]),
        layers=rng.choice([2, 8]),
        pattern=(BlockConfig(attention, mlp),),
        tied=rng.random() < 0.5,
        dtype=rng.choice(["bfloat16", "float32"]),
        remat="full",
    )
    run = RunConfig(name="drawn", model=model)
    return dataclasses.replace(run, data=dataclasses.replace(run.data, batch_size=64, seq_len=1024))


def on(
    run: RunConfig, mesh: str, topology: str, **changes
) -> tuple[memory_estimate.MemoryEstimate, step_time.StepTime]:
    """Prediction of a run on a mesh."""
    cluster, spec = Cluster.parse(topology), MeshSpec.parse(mesh)
    model = dataclasses.replace(run.model, **changes)
    run = dataclasses.replace(run, model=model, mesh=mesh)
    return memory_estimate.predict(run, spec, cluster.topology), step_time.predict(run, cluster, spec)


TOPOLOGIES = {4: ("v6e:2x2", "h100:1x4"), 8: ("v6e:2x4", "h100:1x8"), 16: ("v6e:4x4", "h100:2x8")}


@pytest.mark.parametrize("trial", range(8))
def test_state_is_that_of_the_sharding_table(trial):
    run = drawn(trial)
    for mesh in ("fsdp=8", "fsdp=4,tensor=2", "data=2,fsdp=4"):
        table = sharding_table(dataclasses.replace(run, mesh=mesh), 8)
        found, _ = on(run, mesh, "h100:1x8")
        assert found.parameters == device_bytes(table.parameters)
        assert found.optimizer == device_bytes(table.optimizer)


@pytest.mark.parametrize(
    ("shape", "laid"),
    [
        ((5000,), (5000,)),
        ((58, 112, 2048), (58, 112, 2048)),
        ((58, 14, 2048), (64, 14, 2048)),  # 58 to whole rows wastes less than 14
        ((3, 14, 18432), (3, 16, 18432)),
        ((129280, 14), (129280, 16)),
        ((58, 14, 576), (64, 14, 640)),
        ((8, 64, 8, 64), (8, 128, 8, 64)),
        ((4096, 2, 3), (4096, 2, 3)),  # rows of 1, 2 and 4 fill smaller tiles
    ],
)
def test_arrays_on_tpus_fill_tiles_over_the_two_dimensions_that_waste_least(shape, laid):
    """The compiler's layouts of DeepSeek-V3 on 512 chips."""
    assert memory_estimate.tiled(shape) == math.prod(laid)


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mesh", ["fsdp=4,tensor=2", "stage=2,fsdp=4"])
def test_state_is_that_of_each_optimizer(kind, mesh):
    """The update reads and writes its bytes, beside five passes over parameters and gradients."""
    spec = named(kind).spec
    if not spec.passes or ("stage" in mesh and spec.why_not_staged):
        pytest.skip("no formula, or not in pipelines")
    run = drawn(1)
    block = BlockConfig(AttentionConfig(heads=8, kv_heads=4, head_dim=128), MlpConfig(hidden=2048))
    model = dataclasses.replace(run.model, pattern=(block,))
    run = dataclasses.replace(run, model=model, accumulate=4 if "stage" in mesh else 1)
    run = dataclasses.replace(run, mesh=mesh, optim=named(kind))
    found, took = on(run, mesh, "h100:1x8")
    assert found.optimizer == device_bytes(sharding_table(run, 8).optimizer)
    _, without = on(dataclasses.replace(run, optim=OptimConfig()), mesh, "h100:1x8")
    hardware = Cluster.parse("h100:1x8").hardware
    saved = 2 * (2 * found.parameters + 8 - found.optimizer) / (hardware.bandwidth * DEFAULT.memory)
    assert without.memory - took.memory == pytest.approx(saved, abs=1e-9 * without.memory)


@pytest.mark.drawn(0.3)
def test_plans_are_what_an_optimizer_can_do():
    run = drawn(1)
    model = dataclasses.replace(
        run.model, pattern=(BlockConfig(run.model.pattern[0].attention, MlpConfig(hidden=2048)),)
    )
    run = dataclasses.replace(run, model=model, optim=named("lomo"))
    found = search(run, Cluster.parse("v6e:2x4"))
    assert found.layouts
    for layout in found.layouts:
        assert (layout.run.accumulate, layout.run.model.remat, layout.run.parallel.zero) == (1, "full", 3)
        assert "stage" not in layout.run.mesh
        same = dataclasses.replace(layout.run, optim=OptimConfig())
        assert layout.memory.gradients < memory_estimate.predict(same, layout.mesh, V6E).gradients
    with pytest.raises(ConfigError, match='"mezo" has no backward pass'):
        search(dataclasses.replace(run, optim=named("mezo")), Cluster.parse("v6e:2x4"))


@pytest.mark.parametrize("trial", range(8))
def test_more_devices_never_hold_more_each(trial):
    run = drawn(trial)
    for place in (0, 1):
        held = [on(run, f"fsdp={n}", TOPOLOGIES[n][place])[0] for n in TOPOLOGIES]
        for fewer, more in itertools.pairwise(held):
            assert more.arguments <= fewer.arguments
            assert more.gradients <= fewer.gradients
            assert more.activations <= fewer.activations


@pytest.mark.parametrize("trial", range(8))
def test_recomputing_more_keeps_less_and_computes_more(trial):
    run = drawn(trial)
    for topology in TOPOLOGIES[8]:
        for mesh in ("fsdp=8", "fsdp=4,tensor=2"):
            kept, took = zip(*(on(run, mesh, topology, remat=remat) for remat in REMATS), strict=True)
            assert kept[0].total >= kept[1].total >= kept[2].total
            assert took[0].compute <= took[1].compute < took[2].compute


@pytest.mark.parametrize(
    ("topology", "products", "times"),
    [
        ("h100:1x8", "fp8_current", 2.0),
        ("v6e:2x4", "int8", 2.0),
        ("v6e:2x4", "fp8_delayed", 1.0),
        ("h100:1x8", "fp8_block", 1.0),
    ],
)
def test_products_of_8_bits_are_as_fast_as_the_devices_units(topology, products, times):
    """``fp8_block`` multiplies dequantised values, and v6e has no units for float8."""
    run = llama3_8b()
    plain, rounded = (on(run, "fsdp=8", topology, matmul_precision=name)[1] for name in ("plain", products))
    work = DeviceWork.of(dataclasses.replace(run, mesh="fsdp=8"), MeshSpec.parse("fsdp=8"))
    hardware = Cluster.parse(topology).hardware
    if times == 1.0:
        assert rounded.compute == plain.compute
    else:
        least = sum(
            2 * 3 * w.layers * w.used * w.share * work.tokens for w in work.weights if w.matrix and "segments" in w.name
        )
        assert plain.compute - rounded.compute >= (1 - 1 / times) * least / hardware.flops


@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize(
    ("mesh", "experts"),
    [
        ("fsdp=8", ""),
        ("fsdp=4,expert=2", ""),
        ("expert=8", ""),
        ("fsdp=2,expert=2,tensor=2", ""),
        ("fsdp=2,expert=2,tensor=2", "expert=4"),
        ("fsdp=2,tensor=4", "expert=4"),
    ],
)
def test_experts_take_the_time_of_a_dense_width_that_a_token_goes_through(mesh, experts, top_k):
    """However many experts a device has: those of a token are as wide as one dense feed-forward block."""
    attention = AttentionConfig(heads=8, kv_heads=8, head_dim=64)

    def compute(mlp: MlpConfig | MoeConfig, experts: str) -> float:
        model = DecoderConfig(8192, 512, 4, pattern=(BlockConfig(attention, mlp),), dtype="bfloat16", remat="full")
        run = RunConfig(name="experts", model=model, parallel=ParallelConfig(experts=experts))
        run = dataclasses.replace(run, data=dataclasses.replace(run.data, batch_size=64, seq_len=1024))
        return on(run, mesh, "h100:1x8")[1].compute

    of_experts = compute(MoeConfig(experts=8, top_k=top_k, hidden=8192), experts)
    assert of_experts == pytest.approx(compute(MlpConfig(hidden=8192 * top_k), ""), rel=0.03)  # the router's products


@pytest.mark.parametrize("trial", range(8))
def test_no_step_is_faster_than_its_arithmetic_at_the_peak(trial):
    run = drawn(trial)
    for topology in TOPOLOGIES[8]:
        _, took = on(run, "fsdp=8", topology)
        tokens = run.data.batch_size * run.data.seq_len
        assert took.flops == pytest.approx(train_flops_per_token(run.model, run.data.seq_len) * tokens)
        assert took.seconds >= took.flops / 8 / Cluster.parse(topology).hardware.flops
        assert all(seconds >= 0 for seconds in (*took.near.values(), *took.far.values(), *took.hidden.values()))


@pytest.mark.parametrize("trial", range(4))
def test_twice_the_tokens_take_longer_but_no_more_than_twice(trial):
    run = drawn(trial)
    double = dataclasses.replace(run, data=dataclasses.replace(run.data, batch_size=2 * run.data.batch_size))
    for topology in TOPOLOGIES[8]:
        one, two = on(run, "fsdp=8", topology)[1], on(double, "fsdp=8", topology)[1]
        assert one.seconds < two.seconds <= 2 * one.seconds * (1 + 1e-9)


def test_a_pipelines_bubble_shrinks_with_micro_batches():
    run = drawn(0)
    model = dataclasses.replace(run.model, layers=8)
    run = dataclasses.replace(run, model=model, mesh="stage=2,fsdp=4")
    cluster, mesh = Cluster.parse("h100:1x8"), MeshSpec.parse("stage=2,fsdp=4")
    shares = []
    for micro in (2, 4, 8):
        took = step_time.predict(dataclasses.replace(run, accumulate=micro), cluster, mesh)
        shares.append(took.bubble / took.seconds)
    assert shares[0] > shares[1] > shares[2] > 0
    assert shares[0] == pytest.approx(1 / 3, abs=0.1)  # (P-1)/(M+P-1)


@pytest.mark.parametrize(("schedule", "stages", "micro", "chunks"), [
    ("gpipe", 2, 4, 0), ("1f1b", 4, 2, 0), ("1f1b", 4, 16, 0), ("interleaved", 2, 4, 4), ("interleaved", 4, 4, 2),
    ("gis", 2, 4, 4),
])  # fmt: skip
def test_a_pipelines_bubble_is_that_of_its_timeline(schedule, stages, micro, chunks, monkeypatch):
    """Idle over busy time of the busiest stage, as the schedule's operations come about one after the other.

    The update, which is no part of the pipeline, takes no time here.
    """
    monkeypatch.setattr(step_time, "UPDATE_PASSES", 0)
    monkeypatch.setattr(step_time, "state_bytes", lambda work, parameters: 0)
    run = drawn(0)
    mesh, cluster = f"stage={stages},fsdp={8 // stages}", Cluster.parse("h100:1x8")
    parallel = dataclasses.replace(run.parallel, schedule=schedule, chunks=chunks)
    model = dataclasses.replace(run.model, layers=16)
    run = dataclasses.replace(run, model=model, mesh=mesh, accumulate=micro, parallel=parallel)
    took = step_time.predict(run, cluster, MeshSpec.parse(mesh))
    idle = make(schedule, stages, micro, chunks).bubble(OpCosts(1.0, 1.3, 0.9))
    assert took.bubble / (took.seconds - took.bubble) == pytest.approx(idle / (1 - idle), rel=1e-9)


@pytest.mark.parametrize("rest", [0.4, 1.0, 1.7])
@pytest.mark.parametrize(("stages", "micro"), [(4, 2), (4, 4), (2, 8)])
@pytest.mark.parametrize(("schedule", "chunks"), [("zb_h1", 0), ("gis", 2), ("gis_min", 3)])
def test_a_bubble_that_depends_on_costs_is_that_of_its_timeline(schedule, chunks, stages, micro, rest):
    run = drawn(0)
    run = dataclasses.replace(
        run,
        mesh=f"stage={stages}",
        accumulate=micro,
        model=dataclasses.replace(run.model, layers=12),
        parallel=dataclasses.replace(run.parallel, schedule=schedule, chunks=chunks),
    )
    work = DeviceWork.of(run, MeshSpec.parse(run.mesh))
    busy = micro * (1 + 2 * rest)
    idle = make(schedule, stages, micro, chunks).bubble(OpCosts(1.0, rest, rest))
    assert step_time._bubble(work, busy, 1.0) == pytest.approx(busy * idle / (1 - idle), rel=1e-9)


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [("gpipe", 0), ("1f1b", 0), ("zb_h1", 0), ("interleaved", 0), ("interleaved", 3), ("gis", 0), ("gis", 3)],
)
def test_slots_by_formula_are_those_of_the_table(schedule, chunks):
    """Fewer micro-batches than stages too: a stage holds no more activations than there are micro-batches."""
    for stages, micro in itertools.product((2, 3, 5), range(1, 8)):
        if schedule == "interleaved" and micro % stages:
            continue
        made = tabulate(make(schedule, stages, micro, chunks))
        found = memory_estimate.pipeline_slots(schedule, stages, micro, chunks)
        assert (found.saves, found.pendings, found.hosted) == (made.saves, made.pendings, made.hosted), (stages, micro)


def test_the_longest_lived_chunks_take_bytes_of_their_bands():
    """Of 16 stages, a whole chunk on the host: slots of the other one on the device, three of what is on its way, and
    twice the copies of half of every chunk."""
    run = dataclasses.replace(
        llama3_8b(), mesh="stage=16", accumulate=32, parallel=ParallelConfig(schedule="interleaved", offload=0.5)
    )
    data, model = dataclasses.replace(run.data, batch_size=32), dataclasses.replace(run.model, layers=64)
    run = dataclasses.replace(run, data=data, model=model)
    longest = dataclasses.replace(run, parallel=dataclasses.replace(run.parallel, offload_chunks="longest"))
    works = [DeviceWork.of(one, MeshSpec.parse(one.mesh)) for one in (run, longest)]
    half, whole = (memory_estimate.predict_work(work, Topology.parse("h100:2x8")) for work in works)
    slot = memory_estimate.kept_bytes(works[0]) / 2
    made = make("interleaved", 16, 32)
    first = tabulate(made, {0})
    assert (first.saves, tabulate(made).saves) == (16, 47)
    assert half.activations - whole.activations == pytest.approx(slot * (47 / 2 + 3 / 2 - (16 + 3)), abs=2)
    assert whole.host == pytest.approx(slot * (first.hosted + 1), abs=2)
    transfers = [step_time._host(work, Cluster.parse("h100:2x8").hardware, DEFAULT, 0.0, 0.0) for work in works]
    assert transfers[1] == pytest.approx(2 * transfers[0])


@pytest.mark.parametrize("capacity", [None, 0.3, 1.0, 1.25, 40.0])
@pytest.mark.parametrize(("tokens", "top_k"), [(5, 1), (64, 3)])
def test_rows_of_experts_are_those_of_the_dispatch(capacity, tokens, top_k):
    """The buffer that the experts of one shard are given, in the traced program."""
    moe = MoeConfig(experts=6, top_k=top_k, capacity=capacity)
    given = []

    def experts_run(params, rows, scales, sizes):
        given.append(rows.shape[0])
        return rows

    dispatch = functools.partial(dispatch_within_capacity, capacity=capacity) if capacity else dispatch_and_combine
    jax.eval_shape(
        lambda x, experts, weights: dispatch(x, experts, weights, experts_run, (), 6),
        jax.ShapeDtypeStruct((tokens, 4), jnp.float32),
        jax.ShapeDtypeStruct((tokens, top_k), jnp.int32),
        jax.ShapeDtypeStruct((tokens, top_k), jnp.float32),
    )
    assert memory_estimate.expert_rows(moe, tokens, 1) == given[0]
    if capacity is None:
        assert memory_estimate.expert_rows(moe, tokens, 4) == receive_rows(tokens * top_k, 4)


def test_buffers_with_a_capacity_are_kept_where_rows_in_rounds_are_sent_again():
    """Exchanged rows keep less, and their experts run again in the backward pass; over one shard nothing differs."""
    run = drawn(0)
    block = dataclasses.replace(run.model.pattern[0], mlp=MoeConfig(experts=8, top_k=2, hidden=4096))
    for split in (1, 4):
        mesh = MeshSpec.parse(f"fsdp={8 // split},expert={split}")
        kept, again = [], []
        for capacity in (1.25, None):
            moe = dataclasses.replace(block.mlp, capacity=capacity)
            model = dataclasses.replace(run.model, pattern=(dataclasses.replace(block, mlp=moe),), remat="none")
            work = DeviceWork.of(dataclasses.replace(run, model=model), mesh)
            kept.append(memory_estimate.kept_bytes(work))
            again.append(any(weight.exchanged for weight in work.weights))
        assert again == [False, split > 1]
        assert (kept[0] > kept[1]) == (split > 1)


def test_slow_links_cost_and_fast_ones_do_not():
    run = drawn(0)
    cluster, mesh = Cluster.parse("v6e:2x4"), MeshSpec.parse("fsdp=2,tensor=4")
    run = dataclasses.replace(run, mesh=str(mesh))
    took = []
    for link in (1e9, 100e9, math.inf):
        hardware = dataclasses.replace(cluster.hardware, link=link)
        took.append(step_time.predict(run, dataclasses.replace(cluster, hardware=hardware), mesh).seconds)
    assert took[0] > took[1] > took[2]


@pytest.mark.parametrize(("changes", "mesh", "plain"), [
    ({}, "fsdp=8", False),
    ({"dtype": "float16"}, "fsdp=8", True),
    ({}, "fsdp=2,context=4", True),
])  # fmt: skip
def test_attention_without_a_kernel_moves_its_scores(changes, mesh, plain):
    """No kernel takes float16, and ring attention has none on GPUs: scores go through memory, and wait there."""
    run = llama3_8b()
    run = dataclasses.replace(run, mesh=mesh, model=dataclasses.replace(run.model, **changes))
    work, (block,) = DeviceWork.of(run, MeshSpec.parse(mesh)), set(run.model.blocks)
    assert device_work.KERNEL_HEAD_DIM == MAX_HEAD_DIM
    assert work.has_flash_kernel(block, "gpu") is not plain
    cluster = Cluster.parse("h100:1x8")
    memory, took = memory_estimate.predict_work(work, H100), step_time.predict_work(work, cluster)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceWork, "has_flash_kernel", lambda *_: True)
        less, faster = (
            memory_estimate.predict_work(work, H100),
            step_time.predict_work(work, cluster),
        )
    length = 8192 // (4 if "context" in mesh else 1)
    rows = work.tokens // length
    scores = 10 * 4 * rows * 32 * (length // 8) * 1024
    assert memory.working - less.working == pytest.approx(scores if plain else 0, abs=1)
    # Forward, backward and the recomputation: 6, 11 and 6 passes over half of each row's square.
    moved = 4 * 23 * 32 * work.tokens * 32 * 8193 / 2 / (3.352e12 * DEFAULT.memory)
    assert took.memory - faster.memory <= moved
    assert (took.memory > faster.memory + moved / 2) is plain
