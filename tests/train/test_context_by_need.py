"""Context parallelism by need: the loss and gradients of padded documents, short ones without a byte, balanced work."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from jaxllm.data.context_by_need import ContextSlots, document_lengths
from jaxllm.models import functional
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.train import train, value_and_grad
from jaxllm.train.run_sharding import sharding_table
from jaxllm.train.run_slots import put_slotted
from sharding import MeshSpec, ShardingError, shardings_of
from sharding.state import abstract_params
from tests import quick, tiny
from tests.train import by_need, runs

pytestmark = pytest.mark.usefixtures("shared_programs")

SMALL = {"heads": 4, "kv_heads": 2, "head_dim": 4, "embed_dim": 8, "mlp": 8, "vocab_size": 16, "layers": 2}


@pytest.mark.drawn(0.3)
def test_equals_padded_rows_on_one_device(rng, float64):
    config = tiny.decoder(**SMALL, window=11, remat="full")
    model, slots = functional(config), ContextSlots(2, 4, 8, 32, 8 * 32)
    batch = by_need.mixed_batch(int(rng.integers(2**16)), 8, 32, 16)
    whole = quick.jit(value_and_grad(model, z_loss=0.01))(quick.params(config), by_need.padded(batch))
    mesh = MeshSpec.parse("data=2,context=4").build(jax.devices())
    abstract = abstract_params(model.abstract(), model.logical_axes(), mesh, model.rules)
    with jax.set_mesh(mesh):
        params = jax.device_put(quick.params(config), shardings_of(abstract))
        rows = jax.NamedSharding(mesh, model.rules.spec(("batch", "seq"), mesh))
        placed = put_slotted(batch, slots, rows)
        program = quick.jit(value_and_grad(model, z_loss=0.01, ring_sizes=slots.sizes)).lower(params, placed).compile()
        (sums, grads), (want, want_grads) = jax.device_get((program(params, placed), whole))
    np.testing.assert_allclose(sums.loss, want.loss, rtol=1e-12)
    assert sums.count == want.count
    assert tiny.leaf_error(grads, want_grads) < 1e-12

    sent, outside = by_need.ring_bytes(program.as_text(), len(slots.sizes))
    assert slots.sizes == (1, 2, 4)
    assert sent[0] == outside == 0
    assert 0 < sent[1] < sent[2]


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
def test_documents_take_the_devices_that_they_need(rng, layout):
    slots = ContextSlots(2, 8, 16, 100, 40 * 100, layout=layout)
    assert slots.sizes == (1, 2, 4, 8)
    for _ in range(20):
        lengths = [int(n) for n in np.exp(rng.normal(2.5, 1.3, 300)).clip(1, 100)]
        lengths = [n if rng.random() < 0.9 else -n for n in lengths]
        while sum(map(abs, lengths)) > slots.tokens:
            lengths.pop()
        placed = slots.place(lengths)
        assert len(placed.rings) <= slots.most
        real = placed.source >= 0
        starts = np.concatenate([[0], np.cumsum(np.abs(lengths))])
        there = np.flatnonzero(np.repeat(np.array(lengths) > 0, np.abs(lengths)))
        np.testing.assert_array_equal(np.sort(placed.source[real]), there)
        by_slot = placed.source.reshape(-1, 16, 16)
        for number, length in enumerate(lengths):
            if length < 0:
                continue
            step, device, _ = np.nonzero((by_slot >= starts[number]) & (by_slot < starts[number + 1]))
            assert len(set(step)) == 1
            used, ring = sorted(set(device.tolist())), placed.rings[step[0]]
            if length <= 16:
                assert len(used) == 1
            else:
                assert len(used) == ring >= -(-length // 16)
                assert used[0] % ring == 0
                assert used[-1] - used[0] == ring - 1
        for row in by_slot.reshape(-1, 16):  # of each document in order, which the mask of a device alone relies on
            documents = np.searchsorted(starts, row, side="right")
            for number in set(documents[row >= 0].tolist()):
                assert (np.diff(row[(documents == number) & (row >= 0)]) > 0).all()


@pytest.mark.parametrize(("rows", "devices", "accumulate"), [(1, 8, 8), (2, 4, 4), (4, 2, 2)])
def test_work_is_more_even_than_on_a_static_mesh(rng, rows, devices, accumulate):
    """On average over batches: documents are placed greedily, and one batch in a thousand lies better as it came."""
    slots = ContextSlots(rows, devices, 32 * 512 // (accumulate * rows * devices), 512, 32 * 512)
    found = []
    for seed in rng.integers(2**16, size=8):
        batch = by_need.mixed_batch(int(seed), 32, 512, 16)
        work, static = by_need.slot_work(slots, batch), by_need.static_work(batch, rows, devices, accumulate)
        np.testing.assert_array_equal(work, slots.place(document_lengths(batch.segment_ids)).work)
        assert work.sum() == static.sum()
        found.append((by_need.imbalance(work), by_need.imbalance(static)))
    by_slots, by_rows = np.mean(found, axis=0)
    assert 1 <= by_slots < 0.95 * by_rows


def test_short_documents_go_where_the_least_work_is():
    """Those of four tokens would both fit into the slot of one device."""
    np.testing.assert_array_equal(ContextSlots(1, 2, 8, 8, 16).place([4, 2, 4, 2]).work, [[13, 13]])


def test_rows_that_no_ring_holds_are_refused(tmp_path):
    by_need_of = dataclasses.replace(ParallelConfig(), context="by_need", slot=4)
    config = runs.run_config(tmp_path, mesh="data=2,context=2", parallel=by_need_of)
    with pytest.raises(ShardingError, match=r"rows of 16 tokens.*the 8 that .*data.seq_len = 8, context=4, or .* = 8"):
        sharding_table(config, 4)
    with pytest.raises(ValueError, match='slot = 4 is for context = "by_need"'):
        ParallelConfig(slot=4)
    listed = sharding_table(dataclasses.replace(config, parallel=dataclasses.replace(by_need_of, slot=8)), 4).remark
    assert "rows of 1 to 8 tokens: on one device, nothing is sent" in listed
    assert "rows of 9 to 16 tokens: over rings of 2 devices" in listed


@pytest.mark.drawn(0.3)
def test_a_run_resumes_bitwise(tmp_path, capsys):
    """From the middle of an epoch; the run lists its rings first, and its losses are those of a static ring."""
    settings = {"mesh": "data=2,context=4", "packing": "documents", "every": 3}
    parallel = ParallelConfig(context="by_need", slot=8)
    whole = runs.run_config(tmp_path, name="whole", parallel=parallel, **settings)
    static = runs.run_config(tmp_path, name="static", **settings)
    assert train(whole).complete
    assert "rows of 9 to 16 tokens: over rings of 2 devices" in capsys.readouterr().out
    assert train(static).complete
    runs.stopped_at(tmp_path, 5, name="again", parallel=parallel, **settings)
    assert train(dataclasses.replace(whole, name="again")).complete
    losses = {name: runs.losses(tmp_path / "runs" / name) for name in ("whole", "static", "again")}
    assert losses["again"] == losses["whole"]
    np.testing.assert_allclose(np.array(losses["whole"]), np.array(losses["static"]), rtol=1e-4)
