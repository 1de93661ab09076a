"""Two-level sums of gradients: the flat sum, by groups that compiled programs show; where they come by themselves."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxllm.cli import main
from jaxllm.config import ConfigError
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.plan.formulas.collective_time import Network
from jaxllm.plan.hardware import Cluster
from jaxllm.plan.link_traffic import choices, link_traffic
from jaxllm.train.outer.compressed_gradients import GradsConfig
from jaxllm.train.outer.config import OuterConfig
from jaxllm.train.run import two_level_mesh
from jaxllm.train.run_sharding import sharding_table
from sharding import MeshSpec, partial_sums
from sharding.topology import Topology
from tests import tiny
from tests.proofs.outer.two_level import MESH, run_of_plan
from tests.train.outer_runs import compiled_traffic, float32, run_of, trained
from tests.train.test_plans import SMALL, loss_and_grads

FLAT, TWO_LEVEL = ParallelConfig(reduce="flat"), ParallelConfig(reduce="two_level")


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize(
    ("mesh", "zero", "accumulate"),
    [("data=2,local=4", 3, 1), ("data=2,local=2,fsdp=2", 3, 2), ("data=2,local=2,tensor=2", 2, 2), (MESH, 1, 2)],
)
def test_the_gradients_are_those_of_a_flat_sum(mesh, zero, accumulate, rng, float64):
    config = tiny.decoder(**SMALL, bias="all")
    batch = tiny.batch(int(rng.integers(2**16)), 16, 8, 16, packed=True, padding=True)
    found = [
        loss_and_grads(config, batch, mesh, dataclasses.replace(plan, zero=zero), accumulate)
        for plan in (FLAT, TWO_LEVEL)
    ]
    assert tiny.leaf_error(found[1], found[0]) < 1e-12


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize("plan", [TWO_LEVEL, ParallelConfig(zero="3level")], ids=["two levels", "3-level ZeRO"])
def test_experts_on_groups_equal_one_device(plan, rng, float64):
    config = tiny.decoder(**SMALL | {"layers": 1}, moe=(4, 2, 4, True))
    batch = tiny.batch(int(rng.integers(2**16)), 8, 8, 16, packed=True)
    one = loss_and_grads(config, batch, "data=1", ParallelConfig())
    assert tiny.leaf_error(loss_and_grads(config, batch, "data=2,local=2,expert=2", plan), one) < 1e-10


def test_sums_of_odd_arrays_are_exact(rng, float64):
    """Dimensions that do not divide over local, beside others that do, and arrays in which none does."""
    mesh = MeshSpec.parse("data=2,local=4").build(jax.devices()[:8])
    for shape in ((3, 8), (5, 7), (12,), (1,), (6, 2, 4), ()):
        parts = rng.normal(size=(2, 4, *shape))
        with jax.set_mesh(mesh):
            placed = jax.device_put(parts, jax.NamedSharding(mesh, P("data", "local")))

            def total(x, two_level):
                here = P(*(None,) * (x.ndim - 2), unreduced={"data", "local"})
                x = jax.numpy.einsum("dl...->...", x, out_sharding=here)
                return partial_sums.reduce(x, P(*(None,) * x.ndim), two_level=two_level)

            found = [np.asarray(jax.jit(total, static_argnums=1)(placed, on)) for on in (False, True)]
        for one in found:
            np.testing.assert_allclose(one, parts.sum((0, 1)), rtol=0, atol=1e-12)


def test_the_first_dimension_that_divides_is_split():
    sizes = {"data": 2, "local": 4, "fsdp": 2}
    assert partial_sums.spec_of_parts((3, 8), P("fsdp", None), sizes) == P("fsdp", "local")
    assert partial_sums.spec_of_parts((16, 8), P("fsdp", None), sizes) == P(("fsdp", "local"), None)
    assert partial_sums.spec_of_parts((4, 6), P("fsdp"), sizes) is None
    assert partial_sums.spec_of_parts((), P(), sizes) is None


@pytest.mark.drawn(0.3)
def test_a_program_sends_parts_between_groups(float64):
    """Over data go as many bytes as a group's devices have shares, not whole gradients."""
    run = float32(run_of("data=2,local=4", OuterConfig(), parallel=TWO_LEVEL))
    flat = dataclasses.replace(run, parallel=FLAT)
    _, parts, _ = compiled_traffic(run, "data")
    _, whole, _ = compiled_traffic(flat, "data")
    assert parts < 0.4 * whole  # gains are summed flat
    ends = [trained(one, steps=2).state.params for one in (run, flat)]
    assert tiny.leaf_error(*jax.device_get(ends)) < 1e-5


def test_data_is_split_by_slices_and_nodes():
    run = float32(run_of("data=16", OuterConfig()))
    mesh = MeshSpec.parse("data=16")

    def split(reduce, islands, platform, mesh=mesh, run=run):
        parallel = ParallelConfig(reduce=reduce)
        return str(two_level_mesh(dataclasses.replace(run, parallel=parallel), mesh, islands, platform))

    assert split("auto", 4, "tpu") == "data=4,local=4"
    assert split("auto", 4, "gpu") == "data=16"
    assert split("two_level", 4, "gpu") == "data=4,local=4"
    assert split("flat", 4, "tpu") == "data=16"
    assert split("auto", 16, "tpu") == "data=16"
    assert split("auto", 2, "tpu", MeshSpec.parse("fsdp=4,data=4")) == "fsdp=4,data=2,local=2"
    packed = dataclasses.replace(run, grads=GradsConfig("int8"))
    assert split("auto", 4, "tpu", run=packed) == "data=16"
    with pytest.raises(ConfigError, match=r'give the mesh the axis local .* "data=2,local=4"'):
        split("two_level", 1, "gpu")
    table = sharding_table(dataclasses.replace(run, mesh="data=8"), 8, Topology.parse("2*v6e:2x2"))
    assert table.mesh == {"data": 2, "local": 4}


def test_what_goes_with_two_levels():
    for fields, said in (
        ({"outer": OuterConfig("diloco"), "mesh": "replica=2,data=2,local=2"}, "outer.kind"),
        ({"grads": GradsConfig("int8"), "mesh": "data=2,local=4"}, "grads.compress"),
    ):
        run = run_of(fields["mesh"], fields.get("outer", OuterConfig()), grads=fields.get("grads", GradsConfig()))
        with pytest.raises(ConfigError, match=said):
            sharding_table(dataclasses.replace(run, parallel=TWO_LEVEL), 8)


def test_links_have_the_bytes_of_each_class(capsys):
    cluster, mesh = Cluster.parse("h100:4x8"), MeshSpec.parse("data=4,local=8")
    network = Network(cluster, mesh)
    assert network.sent("all-reduce", ("data",), 2**20) == (0.0, 2 * 2**20 * 3 / 4)
    assert network.sent("reduce-scatter", ("local",), 2**20) == (2**20 * 7 / 8, 0.0)
    assert network.sent("all-reduce", ("data", "local"), 2**20) == (2 * 2**20 * 7 / 8, 2 * 2**17 * 3 / 4)
    run = run_of_plan("two-level")
    run = dataclasses.replace(run, mesh=str(mesh), data=dataclasses.replace(run.data, batch_size=32))
    found = link_traffic(run, mesh, cluster)
    width = 2
    sent = sum(np.prod(row.shape) for row in sharding_table(run, 32).parameters) * width
    assert found.far == pytest.approx(2 * sent / 8 * 3 / 4, rel=0.01)
    assert found.near == pytest.approx(2 * sent * 7 / 8, rel=0.01)
    assert 0 < found.far_exposed < 1
    assert len(choices(run, mesh)) == 8, "four stages of ZeRO, two sums"
    assert main(["shard", "quickstart", "--mesh", "data=4,local=8", "--data.batch-size", "32", "--on", "h100:4x8"]) == 0
    said = capsys.readouterr().out
    assert "ZeRO-3, two-level sums" in said
    assert "network exposed" in said
    arguments = ["shard", "quickstart", "--json", "--mesh", "data=32", "--data.batch-size", "32", "--on", "h100:4x8"]
    assert main(arguments) == 0
    links = json.loads(capsys.readouterr().out)["links"]
    assert links[0]["choice"] == "ZeRO-3"
    assert links[0]["far"] > 0


def test_messages_of_outer_steps_and_compressed_gradients_are_counted():
    cluster = Cluster.parse("h100:4x8")
    mesh = MeshSpec.parse("replica=4,fsdp=8")
    plain = run_of_plan("two-level")
    plain = dataclasses.replace(plain, data=dataclasses.replace(plain.data, batch_size=32), parallel=ParallelConfig())
    one = dataclasses.replace(plain, mesh=str(mesh), outer=OuterConfig("diloco", every=10))
    sent = sum(np.prod(row.shape) for row in sharding_table(one, 32).parameters) * 4 / 8
    found = link_traffic(one, mesh, cluster)
    assert found.far == pytest.approx(2 * sent * 3 / 4 / 10, rel=1e-3)
    assert found.far_exposed > 0
    beside = dataclasses.replace(one, outer=OuterConfig("co2", every=10))
    hidden = link_traffic(beside, mesh, cluster)
    assert 0 < hidden.far_exposed < found.far_exposed, "of a small model, not all is beside arithmetic"
    longer = dataclasses.replace(beside, data=dataclasses.replace(beside.data, seq_len=32_768))
    assert link_traffic(longer, mesh, cluster).far_exposed == 0
    over = MeshSpec.parse("data=4,fsdp=8")
    packed = dataclasses.replace(plain, mesh=str(over), grads=GradsConfig("int8"))
    whole = dataclasses.replace(packed, grads=GradsConfig())
    eight, wide = (link_traffic(run, over, cluster).far for run in (packed, whole))
    assert 0.4 < eight / wide < 0.6  # a byte in place of two
