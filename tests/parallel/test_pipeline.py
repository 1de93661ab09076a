"""Parts of the pipeline executor: tables, stage layouts, the split of a layer, refusals."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name

from jaxllm.config import ConfigError
from jaxllm.data import Batch, DataConfig
from jaxllm.models import functional
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.parallel.pipeline.offload_bands import chunk_lifespans, offload_bands
from jaxllm.parallel.pipeline.schedule import ScheduleError, forward_only
from jaxllm.parallel.pipeline.schedule_generators import make
from jaxllm.parallel.pipeline.schedule_table import KINDS, allocate_slots, tabulate
from jaxllm.parallel.pipeline.stage_layout import assign_units, place_units
from jaxllm.parallel.pipeline.stage_split import split_layer
from jaxllm.parallel.sharding_table_view import size
from jaxllm.train import RunConfig, loss_sums
from jaxllm.train.run import build_value_and_grad, fitting_mesh
from jaxllm.train.run_sharding import sharding_table
from jaxllm.train.step.loss import value_and_grad
from jaxllm.train.step.pipelined_loss import pipeline_plan, pipelined_loss_sums, pipelined_value_and_grad
from jaxllm.train.step.routing_losses import RoutingConfig
from sharding import MeshSpec, ShardingError, shardings_of
from sharding.state import abstract_params
from tests import environment, quick, tiny
from tests.parallel.test_pipeline_schedule import sizes


@settings(max_examples=20)
@given(sizes())
def test_a_table_run_by_hand_computes_everything(sizes):
    """Names instead of numbers: who reads a slot finds what was meant for it."""
    schedule = make(*sizes)
    table = tabulate(schedule)
    last = schedule.stages * schedule.chunks - 1
    pool: list[dict[int, Any]] = [{} for _ in range(schedule.stages)]
    saved: list[dict[int, Any]] = [{} for _ in range(schedule.stages)]
    pending: list[dict[int, Any]] = [{} for _ in range(schedule.stages)]
    host: list[dict[int, Any]] = [{} for _ in range(schedule.stages)]
    left: list[Any] = [None] * schedule.stages
    ready: list[Any] = [None] * schedule.stages
    done = 0
    for t in range(table.ticks):
        out: list[Any] = []
        for s in range(schedule.stages):
            kind, micro, k = KINDS[table.kind[t, s]], table.micro[t, s], table.virtual[t, s]
            message = pool[s].get(table.message[t, s])
            made = None
            assert 0 <= table.out[t, s] <= table.hosted
            host[s][table.out[t, s]] = left[s]
            brought = host[s].get(table.back[t, s])
            if kind in ("B", "W"):
                assert ready[s] == (micro, k), "not what came back from the host"
            if kind == "F":
                left[s] = micro, k
                assert k == 0 or message == ("F", micro, k - 1)
                saved[s][table.saved[t, s]] = micro, k
                made = ("B", micro, k + 1) if k == last else ("F", micro, k)
            elif kind == "B":
                assert message == ("B", micro, k + 1)
                assert saved[s][table.saved[t, s]] == (micro, k)
                pending[s][table.pending[t, s]] = micro, k
                made = "B", micro, k
            elif kind == "W":
                assert saved[s][table.saved[t, s]] == (micro, k)
                assert pending[s][table.pending[t, s]] == (micro, k)
            ready[s] = left[s] if table.stays[t, s] else brought
            done += kind != "idle"
            out.append(made)
        for s in range(schedule.stages):
            pool[s][table.from_self[t, s]] = out[s]
            for pairs, used, slots in (
                (table.pairs_right, table.right, table.from_left),
                (table.pairs_left, table.left, table.from_right),
            ):
                if used[t]:
                    source = next((a for a, b in pairs if b == s), None)
                    pool[s][slots[t, s]] = None if source is None else out[source]
    assert done == schedule.stages * schedule.chunks * schedule.micro_batches * len(schedule.kinds)
    assert table.saves == max(max(schedule.live(s)) for s in range(schedule.stages))
    assert tabulate(forward_only(schedule)).saves == 1


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), min_size=1, max_size=20))
def test_slots_are_as_few_as_things_at_a_time(lives):
    ends = {number: (first, first + more) for number, (first, more) in enumerate(lives)}
    slots = allocate_slots(ends.items())
    for tick in range(26):
        here = [slots[n] for n, (first, last) in ends.items() if first <= tick <= last]
        assert len(set(here)) == len(here)
    most = max(sum(first <= tick <= last for first, last in ends.values()) for tick in range(26))
    assert max(slots.values()) + 1 == most


@settings(max_examples=20)
@given(sizes(), st.lists(st.integers(1, 5), max_size=2), st.integers(0, 5))
def test_every_layer_has_its_place(sizes, first, more):
    schedule = make(*sizes)
    virtual = schedule.stages * schedule.chunks
    repeats = [*first, virtual + more]
    depths = assign_units(repeats, virtual)
    assert depths.counts.sum(1).max() - depths.counts.sum(1).min() <= 1
    assert tuple(depths.counts.sum(0)) == tuple(repeats)
    for g, units in enumerate(repeats):
        where = place_units(depths, schedule, g, units)
        assert np.array_equal(where.taken.reshape(-1)[where.place], np.arange(units))
        for unit, place in enumerate(where.place):
            stage, rest = divmod(int(place), where.taken.shape[1])
            chunk = rest // depths.rooms[g]
            k = schedule.virtual(stage, chunk)
            assert depths.firsts[k, g] <= unit < depths.firsts[k, g] + depths.counts[k, g]


@pytest.mark.parametrize("remat", ["none", "elementwise", "full"])
@pytest.mark.parametrize("split", [False, True])
def test_a_layer_in_three_parts(remat, split, rng, float64):
    def layer(w: Any, x: Any, consts: Any) -> Any:
        h = checkpoint_name((x * w["gain"]) @ w["up"].astype(jnp.float32).astype(x.dtype), "up")
        y = x + jax.jit(jnp.tanh)(h) @ w["down"] * consts
        return (y, jnp.sum(jnp.sin(h))), {"mean": jnp.mean(h), "zero": jnp.zeros(3)}

    apart = lambda a, b: float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))  # noqa: E731
    shapes = {"gain": (4,), "up": (4, 6), "down": (6, 4)}
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape))  # noqa: E731
    w = {name: draw(*shape) for name, shape in shapes.items()}
    x, dy, consts = draw(5, 4), draw(5, 4), draw(5, 1)
    parts = split_layer(layer, w, x, consts, remat=remat, names=["up"], split=split)
    (y, _), pull, more = jax.vjp(lambda w, x: layer(w, x, consts), w, x, has_aux=True)
    dw, dx = pull((dy, jnp.ones(())))

    found, said, saved = parts.forward(w, x, consts)
    assert apart(found, y) < 1e-6
    assert apart(said["mean"], more["mean"]) < 1e-6
    assert said["zero"].shape == (3,)
    back, early, pending = parts.backward(w, saved, consts, dy)
    assert apart(back, dx) < 1e-6
    late = parts.weights(w, saved, consts, pending) if split else {}
    assert set(early) | set(late) == {0, 1, 2}
    assert not set(early) & set(late)
    for number, want in enumerate(jax.tree.leaves(dw)):
        assert apart({**early, **late}[number], want) < 1e-6

    shapes_of = lambda values: sorted(v.shape for v in values)  # noqa: E731
    if remat == "full":
        assert shapes_of(saved) == [(5, 4)]
    elif remat == "elementwise":
        assert shapes_of(saved) == [(5, 4), (5, 6)]
    assert all(v.shape[0] == 5 for v in saved), "a weight is saved"
    assert bool(pending) == split
    # No product of the backward pass is left for W but the weights' own.
    products = lambda fn, *args: str(jax.make_jaxpr(fn)(*args)).count("dot_general")  # noqa: E731
    if split:
        assert products(parts.weights, w, saved, consts, pending) == 2
        assert products(parts.backward, w, saved, consts, dy) == {"none": 2, "elementwise": 2, "full": 3}[remat]


NAMED = ("schedule", "chunks", "depths", "offload", "offload_chunks")


def run_of(**fields: Any) -> RunConfig:
    config = RunConfig(model=tiny.decoder(layers=6, dtype="float32"), accumulate=4, mesh="stage=2")
    parallel = {name: fields.pop(name) for name in NAMED if name in fields}
    return replace(config, data=DataConfig(batch_size=8), parallel=ParallelConfig(**parallel), **fields)


@pytest.mark.parametrize(
    ("fields", "stages", "says"),
    [
        ({}, 4, "6 layers do not divide over stage=4: say how many each stage gets, such as --parallel.depths 1 2 2 1"),
        ({}, 8, "6 layers (or groups of them) for 8 virtual stages"),
        ({"schedule": "interleaved", "accumulate": 2}, 4, "a multiple of the 4 stages: 4"),
        ({"depths": (1, 2)}, 2, "give 2 positive numbers, one for each virtual stage in model order, with sum 6"),
        ({"chunks": 2}, 2, '"gis_min" take other numbers'),
        ({"offload": 0.5, "offload_chunks": "longest"}, 2, "give a schedule of several chunks and a share above 0"),
    ],
)
def test_illegal_pipelines_say_what_is_legal(fields, stages, says):
    with pytest.raises(ScheduleError, match=re.escape(says)):
        pipeline_plan(run_of(**fields), stages)


@pytest.mark.parametrize("fields", [{"chunks": 2, "schedule": "interleaved"}, {"depths": (2, 4)}, {"offload": 0.5}])
def test_sizes_of_a_pipeline_without_one_are_refused(fields):
    config = run_of(mesh="data=2", **fields)
    with pytest.raises(ConfigError, match="the mesh 'data=2' does not go with parallel"):
        fitting_mesh(config, functional(config.model, config.parallel.rules()), 2)


def test_a_mesh_whose_stages_do_not_fit_names_those_that_do():
    config = run_of(mesh="stage=4,data=2")
    model = functional(config.model, config.parallel.rules())
    with pytest.raises(ShardingError, match=r"6 layers do not divide over stage=4.*nearest .*stage=2"):
        fitting_mesh(config, model, 8)


def test_the_sharding_table_says_what_a_pipeline_takes():
    config = run_of(mesh="stage=2,tensor=2", schedule="zb_h1", model=tiny.decoder(layers=6, dtype="float32", tied=True))
    found = sharding_table(config, 4)
    assert next(row.place for row in found.parameters if row.name.endswith("mlp/up")) == "up[L_stage, D, F_tensor]"
    assert next(row.place for row in found.parameters if row.name.endswith("table")) == "table[V_tensor, D_stage]"
    seq_len = config.data.seq_len
    message = 2 * seq_len * 16 * 4
    assert f"3 x {size(message)}" not in found.remark
    assert f"6 x {size(message)} = {size(6 * message)}" in found.remark, "two slots of three layers"
    assert f"{size(64 * 16 * 4 // 2)}, and" in found.remark
    assert "host" not in found.remark
    some = replace(config, parallel=replace(config.parallel, offload=1 / 3))  # one layer of three
    remark = sharding_table(some, 4).remark
    assert f"saved layer inputs on a device: 6 x {size(message)}" in remark, (
        "two slots of two layers, and the third going and coming"
    )
    assert f"offloaded to its host: 3 x {size(message)}" in remark, "two slots, and one for what nobody needs"
    assert f"copied to and from the host by every operation: 1 x {size(message)}" in remark
    plan = ParallelConfig(schedule="interleaved", offload=0.5, offload_chunks="longest")
    model = tiny.decoder(layers=8, dtype="float32", tied=True)
    remark = sharding_table(replace(config, model=model, parallel=plan), 4).remark
    schedule = make("interleaved", 2, 4)
    kept, hosted = tabulate(schedule, {0}).saves, tabulate(schedule, {0}).hosted
    assert f"saved layer inputs on a device: {2 * kept + 2 * 2} x {size(message)}" in remark
    assert f"offloaded to its host: {2 * (hosted + 1)} x {size(message)}" in remark
    assert f"copied to and from the host by every operation: 2 x {size(message)}" in remark


def test_a_share_of_few_layers_is_one_of_them():
    assert assign_units([4], 4).offloaded(0.1) == (1,)
    assert assign_units([4], 4).offloaded(0.0) == (0,)
    assert assign_units([16], 2).offloaded(0.5) == (4,)


@pytest.mark.parametrize("name", ["interleaved", "gis", "gis_min", "v_min", "v_half", "v_zb"])
def test_the_longest_lived_chunks_are_offloaded_first(name):
    """As many layers as with the same share of every chunk, of the chunks whose activations wait longest; pools are of
    what lives at once there, and of nothing else."""
    schedule, room = make(name, 4, 8), 5
    spans = chunk_lifespans(schedule)
    assert spans[0] > spans[1], "the first layers' activations wait for all others' passes"
    for share in (0.2, 0.5, 0.7, 1.0):
        (even,), (bands,) = (offload_bands(schedule, [room], share, which) for which in ("all", "longest"))
        assert [band.away for band in even] == [{0, 1}, set()][: 1 if share == 1 else 2]
        assert (bands[0].first, bands[-1].end) == (0, room)
        away = {c: sum(b.end - b.first for b in bands if c in b.away) for c in (0, 1)}
        assert sum(away.values()) == 2 * sum(b.end - b.first for b in even if b.away)
        assert away[0] == room or away[1] == 0
        for band in (*bands, *even):
            table, whole = tabulate(schedule, band.away), tabulate(schedule)
            assert (table.kind == whole.kind).all()
            kept, hosted = [0], [0]
            last = len(schedule.kinds) - 1
            for stage in range(4):
                held: dict[tuple[int, int], int] = {}
                for tick in range(table.ticks):
                    kind, op = table.kind[tick, stage], (table.micro[tick, stage], table.chunk[tick, stage])
                    if kind == 1 and op[1] not in band.away:
                        assert table.saved[tick, stage] not in held.values()
                        held[op] = table.saved[tick, stage]
                    elif kind and op[1] not in band.away:
                        assert held[op] == table.saved[tick, stage]
                    kept.append(len(held))
                    if kind == last + 1:
                        held.pop(op, None)
                    if table.out[tick, stage] < table.hosted:
                        assert table.chunk[tick - 1, stage] in band.away
                        hosted.append(table.out[tick, stage])
            assert table.saves == max(1, *kept)
            assert table.hosted == 1 + max(hosted) if band.away else table.hosted == 0


def test_rings_in_stages_are_refused_on_cpu():
    config = run_of(mesh="stage=2,context=2")
    model = functional(config.model, config.parallel.rules())
    mesh = MeshSpec.parse(config.mesh).build(jax.devices()[:4])
    run = pipelined_loss_sums(model, *pipeline_plan(config, 2))
    abstract = abstract_params(model.abstract(), model.logical_axes(), mesh, model.rules)
    with jax.set_mesh(mesh), pytest.raises(ScheduleError, match="all_gather"):
        jax.eval_shape(run, abstract, tiny.batch(0, 8, 8, 64, packed=False))


def test_evaluation_goes_through_the_same_stages(rng):
    seed = int(rng.integers(2**16))
    config = run_of(mesh="stage=2,tensor=2", schedule="v_half")
    batch = tiny.batch(seed, 8, 8, 64, packed=True)
    params = quick.params(config.model, seed)
    want = quick.jit(lambda p, b: loss_sums(functional(config.model), p, b))(params, batch)
    model = functional(config.model, config.parallel.rules())
    mesh = MeshSpec.parse(config.mesh).build(jax.devices()[:4])
    with jax.set_mesh(mesh):
        abstract = abstract_params(model.abstract(), model.logical_axes(), mesh, model.rules)
        placed = jax.device_put(params, shardings_of(abstract))
        got = quick.jit(pipelined_loss_sums(model, *pipeline_plan(config, 2)))(
            placed, jax.device_put(batch, jax.NamedSharding(mesh, jax.P()))
        )
    assert got.routing is want.routing is None
    np.testing.assert_allclose(np.asarray(got[:4]), np.asarray(want[:4]), rtol=1e-5)


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize(("mesh", "schedule"), [("stage=2,data=2", "zb_h1"), ("stage=2,expert=2", "interleaved")])
def test_routers_are_heard_in_stages(mesh, schedule, rng, float64):
    """Their losses, and how many tokens each expert of each layer got, are those of one device."""
    model = tiny.decoder(layers=5, moe=(4, 2, 8, False), embed_grad=0.1)
    layers = (1, 1, 1, 2) if schedule == "interleaved" else (2, 3)
    config = run_of(mesh=mesh, schedule=schedule, depths=layers, model=model)
    batch = tiny.batch(int(rng.integers(2**16)), 8, 8, 64, packed=True, padding=True)
    params = quick.params(config.model, 0)
    routing = RoutingConfig(balance_loss=0.3, z_loss=0.1)
    same = {"z_loss": 0.01, "routing": routing}
    one = value_and_grad(functional(config.model), accumulate=config.accumulate, **same)
    want, want_grads = quick.jit(one)(params, batch)
    piped = functional(config.model, config.parallel.rules())
    built = MeshSpec.parse(mesh).build(jax.devices()[:4])
    with jax.set_mesh(built):
        abstract = abstract_params(piped.abstract(), piped.logical_axes(), built, piped.rules)
        placed = jax.device_put(params, shardings_of(abstract))
        spec = piped.rules.spec(("batch", "seq"), built)
        got, grads = quick.jit(pipelined_value_and_grad(piped, *pipeline_plan(config, 2), **same))(
            placed, jax.device_put(batch, jax.NamedSharding(built, spec))
        )
    assert np.array_equal(got.routing.counts, want.routing.counts)
    assert want.loss > want.nll + 0.01 * want.z
    for name in ("loss", "nll", "count"):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), rtol=1e-12)
    for name in ("balance", "z", "dropped"):
        np.testing.assert_allclose(getattr(got.routing, name), getattr(want.routing, name), rtol=1e-12)
    assert tiny.leaf_error(jax.device_get(grads), want_grads) < 1e-10


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize(("tied", "zero", "schedule"), [(True, 3, "1f1b"), (False, 1, "zb_h1")])
def test_a_width_that_stages_do_not_divide(tied, zero, schedule, rng, float64):
    """Embedding and head are then on every stage, split over fsdp alone; the step is that of one device."""
    config = run_of(mesh="stage=3,fsdp=2", model=tiny.decoder(layers=6, tied=tied), schedule=schedule)
    config = replace(config, parallel=replace(config.parallel, zero=zero))
    batch = tiny.batch(int(rng.integers(2**16)), 8, 8, 64, packed=True, padding=True)
    params = quick.params(config.model, 0)
    want, want_grads = quick.jit(value_and_grad(functional(config.model), accumulate=4))(params, batch)
    model = functional(config.model, config.parallel.rules())
    mesh = fitting_mesh(config, model, 6).build(jax.devices()[:6])
    with jax.set_mesh(mesh):
        abstract = abstract_params(model.abstract(), model.logical_axes(), mesh, model.rules)
        assert abstract["embedding"]["table"].sharding.spec == jax.P(None, "fsdp")
        placed = jax.device_put(params, shardings_of(abstract))
        got, grads = quick.jit(pipelined_value_and_grad(model, *pipeline_plan(config, 3), zero=zero))(
            placed, jax.device_put(batch, jax.NamedSharding(mesh, jax.P("fsdp")))
        )
    np.testing.assert_allclose(float(got.loss), float(want.loss), rtol=1e-12)
    assert tiny.leaf_error(jax.device_get(grads), want_grads) < 1e-10


def compiled(config: RunConfig, rows: Any) -> str:
    """The program of loss and gradients, for eight devices."""
    piped = functional(config.model, config.parallel.rules())
    mesh = MeshSpec.parse(config.mesh).build(jax.devices()[:8])
    params = abstract_params(piped.abstract(), piped.logical_axes(), mesh, piped.rules)
    tokens: Any = jax.ShapeDtypeStruct((8, 8), jnp.int32, sharding=jax.NamedSharding(mesh, rows))
    with jax.set_mesh(mesh):
        batch = Batch(tokens, tokens, tokens, tokens)
        step = jax.jit(build_value_and_grad(config, piped, mesh), out_shardings=(None, shardings_of(params)))
        return step.lower(params, batch).compile(environment.AS_EVER).as_text() or ""


@pytest.mark.drawn(0.3)
def test_a_kv_head_for_all_is_gathered_without_sending_it_around():
    """A permutation in a branch waits for ever on CPU: the stages are in different ones."""
    config = run_of(mesh="stage=2,context=2,tensor=2", model=tiny.decoder(kv_heads=1, layers=2, dtype="float32"))
    config = replace(config, parallel=replace(config.parallel, context="all_gather", layout="contiguous"))
    program = compiled(config, jax.P(None, "context"))
    sent = [line for line in program.splitlines() if re.search(r"collective-permute(-start)?\(", line)]
    assert sent
    assert not [line for line in sent if "/ppermute" not in line]


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize(("schedule", "zero"), [("1f1b", 1), ("interleaved", 2), ("zb_h1", 3)])
def test_weights_and_gradients_stay_split_inside_stages(schedule, zero):
    """Nothing gathers a matrix over ``tensor``, on the way in, in a step or on the way out."""
    wide, vocab = 88, 104
    model = tiny.decoder(layers=4, mlp=wide, vocab_size=vocab, dtype="float32", tied=False, remat="full")
    config = run_of(mesh="stage=2,fsdp=2,tensor=2", schedule=schedule, model=model)
    config = replace(config, parallel=replace(config.parallel, zero=zero))
    program = compiled(config, jax.P("fsdp"))
    shapes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]+)\]", program)}
    assert any(wide // 2 in shape for shape in shapes)
    assert not [shape for shape in shapes if wide in shape or vocab in shape]
