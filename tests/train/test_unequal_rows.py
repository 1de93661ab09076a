"""Uneven rows: one device's loss and gradients, no collective over data in the loop, no padding computed, resumes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.models import functional
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.train import train, value_and_grad
from jaxllm.train.run_sharding import sharding_table
from jaxllm.train.step.objective import CrossEntropyObjective, LossSums
from jaxllm.train.unequal.unequal_rows import UnequalRows
from sharding import MeshSpec, shardings_of
from sharding.state import abstract_params
from tests import quick, tiny
from tests.train import runs
from tests.train.unequal_programs import joined_axes

pytestmark = pytest.mark.usefixtures("shared_programs")

SMALL = {"heads": 4, "kv_heads": 2, "head_dim": 4, "embed_dim": 8, "mlp": 8, "vocab_size": 16, "layers": 2}
COUNTS = (5, 1, 2)


@dataclasses.dataclass(frozen=True)
class CountedCrossEntropy(CrossEntropyObjective):
    """Cross-entropy that also counts the micro-batches which each index of the uneven axes computes."""

    metrics = ("micro_batches",)
    devices: int = 1
    over: tuple[str, ...] = ("data",)

    def sums(self, model: Any, hidden: Any, head: Any, batch: Any) -> LossSums:
        own = jax.nn.one_hot(jax.lax.axis_index(self.over), self.devices)
        return super().sums(model, hidden, head, batch)._replace(metrics={"micro_batches": own})

    def no_sums(self, batch: Any, zero: Any) -> LossSums:
        return super().no_sums(batch, zero)._replace(metrics={"micro_batches": jnp.zeros(self.devices)})


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize(
    ("kind", "counts", "zero", "over"),
    [("dense", (3, 1), 3, {"data"}), ("mixture", (3, 1), 2, {"data"}), ("dense", (2, 3, 1, 2), 1, {"data", "fsdp"})],
)
def test_equals_one_device(rng, float64, kind, counts, zero, over):
    config = tiny.decoder(**SMALL, moe=(4, 2, 8, False) if kind == "mixture" else None, remat="full")
    model, uneven = functional(config), UnequalRows(counts, 16 // sum(counts))
    batch = tiny.batch(int(rng.integers(2**16)), 16, 16, 16, packed=True, padding=True)
    want, want_grads = jax.device_get(quick.jit(value_and_grad(model, z_loss=0.01))(quick.params(config), batch))
    mesh = MeshSpec.parse("data=2,fsdp=2,tensor=2").build(jax.devices())
    abstract = abstract_params(model.abstract(), model.logical_axes(), mesh, model.rules)
    counted = CountedCrossEntropy(0.01, devices=len(counts), over=tuple(sorted(over)))
    with jax.set_mesh(mesh):
        params = jax.device_put(quick.params(config), shardings_of(abstract))
        rows = jax.NamedSharding(mesh, model.rules.spec(("batch", "seq"), mesh))
        placed = jax.device_put(uneven.arrange(batch), rows)
        step = quick.jit(value_and_grad(model, objective=counted, micro_batches=counts, zero=zero))
        program = step.lower(params, placed).compile()
        sums, grads = jax.device_get(program(params, placed))
    np.testing.assert_allclose(sums.loss, want.loss, rtol=1e-12)
    assert sums.count == want.count
    assert tiny.leaf_error(grads, want_grads) < 1e-12
    np.testing.assert_array_equal(sums.metrics["micro_batches"], counts)  # none is of padding

    inside, outside = joined_axes(str(program.as_text()), mesh)
    assert inside == {"data", "fsdp", "tensor"} - over
    assert over <= outside


def test_numbers_of_other_devices_are_refused():
    model = functional(tiny.decoder(**SMALL, dtype="float32"))
    mesh = MeshSpec.parse("data=2,fsdp=4").build(jax.devices())
    abstract = abstract_params(model.abstract(), model.logical_axes(), mesh, model.rules)
    batch = tiny.batch(1, 24, 16, 16, packed=False)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="one number of micro-batches for each index of the mesh"):
        jax.eval_shape(value_and_grad(model, micro_batches=(1, 2, 3)), abstract, batch)


def test_rows_keep_their_order():
    uneven = UnequalRows(COUNTS, 2)
    batch = tiny.batch(1, 16, 8, 16, packed=False)
    found = uneven.arrange(batch)
    assert found.tokens.shape == (uneven.rows, 8) == (30, 8)
    source = uneven.source.reshape(3, 2, 5)  # data, row of a micro-batch, micro-batch
    for device, (count, first) in enumerate(zip(COUNTS, (0, 10, 12), strict=True)):
        own = source[device][:, :count].reshape(-1)
        np.testing.assert_array_equal(own, np.arange(first, first + 2 * count))
        assert (source[device][:, count:] == -1).all()
    padding = uneven.source < 0
    np.testing.assert_array_equal(found.tokens[~padding], batch.tokens[uneven.source[~padding]])
    assert (found.targets[padding] == -1).all()
    assert (found.segment_ids[padding] == 0).all()
    np.testing.assert_array_equal(UnequalRows((4, 4), 2).source, np.arange(16))


@pytest.mark.parametrize(
    ("counts", "fields", "message"),
    [
        ((3, 1, 2), {}, "3 1 2 does not go with the mesh 'data=2,fsdp=2' with parallel.zero = 3.*one number for each"),
        ((3, 1, 2, 2), {}, "does not go with the mesh .*parallel.zero = 1 and as many as data x fsdp"),
        ((3, 2), {}, "5 micro-batches, but accumulate = 2 on data = 2 makes 4.*whose sum is 4[.]"),
        ((3, 3), {}, "sum is 4, or set accumulate to 3"),
        ((3, 1), {"batch_size": 6}, "batch_size = 6 does not divide into 4 .*nearest that do: 4, 8"),
        ((3, 1), {"mesh": "fsdp=4"}, "the mesh 'fsdp=4' with parallel.zero = 3: there is one number for each index"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, counts, fields, message):
    parallel = ParallelConfig(micro_batches=counts)
    config = runs.run_config(tmp_path, **{"mesh": "data=2,fsdp=2", "accumulate": 2, "parallel": parallel, **fields})
    with pytest.raises(ValueError, match=message):
        sharding_table(config, 4)


def test_numbers_are_listed(tmp_path):
    with pytest.raises(ValueError, match="give each device one or more"):
        ParallelConfig(micro_batches=(2, 0))
    parallel = ParallelConfig(micro_batches=(3, 1))
    config = runs.run_config(tmp_path, mesh="data=2,fsdp=2", accumulate=2, parallel=parallel)
    assert "uneven rows: 6, 2 rows of a step over data, in 3, 1" in sharding_table(config, 4).remark


@pytest.mark.drawn(0.3)
def test_a_run_resumes_bitwise(tmp_path, capsys):
    """From the middle of an epoch; rows of each step are those of an even run, and other numbers may resume it."""
    settings = {"mesh": "data=4,fsdp=2", "packing": "documents", "every": 3, "accumulate": 2, "batch_size": 16}
    parallel = ParallelConfig(micro_batches=(3, 2, 1, 2))
    whole = runs.run_config(tmp_path, name="whole", parallel=parallel, **settings)
    even = runs.run_config(tmp_path, name="even", **settings)
    assert train(whole).complete
    assert "uneven rows: 6, 4, 2, 4 rows of a step over data" in capsys.readouterr().out
    assert train(even).complete
    for name in ("again", "other"):
        runs.stopped_at(tmp_path, 5, name=name, parallel=parallel, **settings)
    assert train(dataclasses.replace(whole, name="again")).complete
    other = dataclasses.replace(whole, name="other", parallel=ParallelConfig(micro_batches=(1, 1, 4, 2)))
    assert train(other).complete
    losses = {name: runs.losses(tmp_path / "runs" / name) for name in ("whole", "even", "again", "other")}
    assert losses["again"] == losses["whole"]
    assert losses["other"][:5] == losses["whole"][:5]
    for name in ("even", "other"):
        np.testing.assert_allclose(np.array(losses[name]), np.array(losses["whole"]), rtol=1e-4)
