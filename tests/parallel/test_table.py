"""Sharding table: bytes of each parameter on a device, computed without one."""

from __future__ import annotations

import dataclasses
import json

import jax
import pytest
from jax.sharding import PartitionSpec as P

from jaxllm.cli import main
from jaxllm.models import DecoderConfig, functional
from jaxllm.optim import optimizer
from jaxllm.parallel.sharding_table import ExpectedCollective, device_bytes, notation
from jaxllm.parallel.sharding_table_view import size, text
from jaxllm.train import RunConfig, abstract_state, init_state
from jaxllm.train.run_sharding import sharding_table
from sharding import MeshSpec
from tests import tiny


@pytest.mark.parametrize(
    ("spec", "axes", "expected"),
    [
        (P(None, "fsdp", "tensor"), ("layers", "embed", "heads", "head_dim"), "w[L, D_fsdp, N_tensor, H]"),
        (P(("data", "fsdp")), ("batch",), "w[batch_{data,fsdp}]"),
        (P(), (), "w[]"),
        (P("tensor"), (None, "vocab"), "w[._tensor, V]"),
    ],
)
def test_notation(spec, axes, expected):
    assert notation("w", spec, axes) == expected


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("mesh", ["fsdp=4,tensor=2", "data=2,fsdp=4", "tensor=8"])
def test_bytes_are_those_of_a_real_state(mesh):
    model = tiny.decoder(
        dtype="float32", heads=8, kv_heads=8, head_dim=4, embed_dim=16, mlp=16, vocab_size=32, layers=2
    )
    config = RunConfig(model=model, mesh=mesh)
    found = sharding_table(config, 8)
    made = functional(model, config.parallel.rules())
    transform = optimizer(config.optim, config.steps, made.logical_axes())
    built = MeshSpec.parse(mesh).build()
    state = init_state(made, transform, built, 0, abstract_state(made, transform, built))
    for rows, tree in ((found.parameters, state.params), (found.optimizer, state.opt_state)):
        paths = jax.tree_util.tree_leaves_with_path(tree)
        real = {
            jax.tree_util.keystr(path, simple=True, separator="/"): leaf.addressable_shards[0].data
            for path, leaf in paths
        }
        assert {row.name: row.device_bytes for row in rows} == {name: leaf.nbytes for name, leaf in real.items()}
        assert device_bytes(rows) == sum(leaf.nbytes for leaf in real.values())
    for row in found.optimizer:  # moments lie as their parameters do
        of_parameter = [one for one in found.parameters if row.name.endswith("/" + one.name)]
        assert not of_parameter or row.place == of_parameter[0].place


def test_text_has_every_parameter_and_the_expected_collectives():
    found = sharding_table(RunConfig(model=DecoderConfig(tied=False, remat="full"), mesh="fsdp=8"), 8)
    shown = text(found)
    for row in found.parameters:
        assert f"{row.name} " in shown
        assert row.place in shown
    assert "all-gather" in shown
    assert "collectives" not in text(dataclasses.replace(found, collectives=()))
    more = dataclasses.replace(found, collectives=(ExpectedCollective("all-gather", ("fsdp",), 48, 2**20, "weights"),))
    assert "all-gather             fsdp          48    1.00 MiB  weights" in text(more)


def test_a_plan_without_a_formula_says_so():
    found = sharding_table(RunConfig(mesh="fsdp=8"), 8)
    assert not found.collectives
    assert 'with remat = "elementwise", a tied embedding: no formula yet.' in text(found)


@pytest.mark.parametrize(
    ("number", "expected"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (3 * 2**29, "1.50 GiB"), (2**50, "1024.00 TiB")],
)
def test_size(number, expected):
    assert size(number) == expected


def test_the_command(capsys):
    assert main(["shard", "quickstart", "--mesh", "fsdp=4,tensor=5", "--on", "v6e:4x4"]) == 2
    assert "The nearest meshes of 16 devices that this model and batch fit" in capsys.readouterr().err
    assert main(["shard", "quickstart", "--json", "--mesh", "fsdp=16", "--model.layers=3"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["devices"] == 16
    assert told["mesh"] == {"fsdp": 16}
    (row,) = [row for row in told["parameters"] if row["name"].endswith("mlp/up")]
    assert row["shape"][0] == 3
    assert row["device_bytes"] == row["bytes"] // 16
    assert main(["shard", "quickstart", "--on", "v6e:4x4", "--devices", "3"]) == 2
    assert "leave out --devices" in capsys.readouterr().err
    assert main(["shard", "quickstart", "--no-such", "1"]) == 2
    assert "no setting --no-such" in capsys.readouterr().err
