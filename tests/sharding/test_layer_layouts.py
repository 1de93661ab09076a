"""Layouts by layer: how they are written, which rules the layers get, and what is refused."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxllm.config import ConfigError
from jaxllm.infer.runner.serving_mesh import serving_rules
from jaxllm.models import Segments, functional
from jaxllm.models.functional import layouts_by_segment
from jaxllm.parallel.collective_traffic import expected_collectives
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.plan.formulas.device_work import DeviceWork
from jaxllm.train.run import fitting_mesh
from jaxllm.train.run_model import run_model
from jaxllm.train.run_rows import rows_on_mesh
from sharding import MeshSpec, ShardingError, abstract_params
from sharding.layer_layouts import rules_of
from tests import tiny
from tests.train.feature_pairs import BASE

MESH = MeshSpec.parse("fsdp=2,tensor=4")


def run_of(layers: str, mesh: str = "fsdp=2,tensor=4", rows: int = 8, **fields):
    """A run of four layers with layouts by layer."""
    parallel = dataclasses.replace(BASE.parallel, layers=layers, **fields)
    data = dataclasses.replace(BASE.data, batch_size=rows)
    return dataclasses.replace(BASE, mesh=mesh, parallel=parallel, data=data)


def test_one_layout_of_all_layers_is_none_of_their_own():
    assert ParallelConfig().rules() == ParallelConfig(layers="tensor").rules()
    assert ParallelConfig().rules().layouts == ()
    assert ParallelConfig(layers="tensor=8,fsdp").rules().layouts == (("tensor", 8), ("fsdp", None))


@pytest.mark.parametrize("text", ["", "data", "tensor=8,fsdp=", "tensor,fsdp=8", "fsdp=0", "0-7:fsdp"])
def test_text_that_is_no_list_of_layouts(text):
    with pytest.raises(ShardingError, match="Give one of tensor, fsdp, or both with their numbers of layers"):
        ParallelConfig(layers=text)


def test_rows_and_weights_of_both_layouts():
    rules, mesh = ParallelConfig(sequence=True).rules(), MESH.abstract()
    apart = rules_of(rules, "fsdp")
    assert rules_of(rules, "tensor") == rules
    assert tuple(rules.spec(("batch", "residual_seq", "act_embed"), mesh)) == ("fsdp", "tensor", None)
    assert tuple(apart.spec(("batch", "residual_seq", "act_embed"), mesh)) == (("fsdp", "tensor"), None, None)
    assert tuple(rules.spec(("embed", "heads", "head_dim"), mesh, gathered=True)) == (None, "tensor", None)
    assert tuple(apart.spec(("embed", "heads", "head_dim"), mesh, gathered=True)) == (None, None, None)
    for name in ("act_heads", "act_kv_heads", "act_mlp", "attn_heads", "expert_mlp"):
        assert "tensor" not in apart.mesh_axes(name)


def test_weights_are_stored_as_without_layouts_by_layer():
    config, mesh = tiny.decoder(heads=8, kv_heads=4, layers=4), MESH.abstract()
    stored = []
    for layers in ("tensor", "tensor=1,fsdp"):
        model = functional(config, ParallelConfig(layers=layers).rules())
        stored.append(abstract_params(model.abstract(), model.logical_axes(), mesh, model.rules))
    assert stored[0] == stored[1]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("tensor=2,fsdp=3", "covers 5 layers, but the model has 4"),
        ("tensor=2,fsdp=1", "covers 3 layers, but the model has 4"),
        ("tensor=4,fsdp", "covers 4 layers, but the model has 4"),
    ],
)
def test_numbers_of_layers_that_are_not_the_models(layers, message):
    with pytest.raises(ShardingError, match=f"{message}.*add up to 4"):
        run_model(run_of(layers))


def test_a_layout_does_not_end_inside_a_group_that_repeats():
    block = tiny.decoder().pattern[0]
    config = dataclasses.replace(tiny.decoder(layers=6), pattern=(block, block), prefix=(block, block))
    rules = ParallelConfig(layers="tensor=2,fsdp=2,tensor").rules()
    assert layouts_by_segment(rules, config) == [[("tensor", 2)], [("fsdp", 1), ("tensor", 1)]]
    with pytest.raises(ShardingError, match="splits a group of 2 layers"):
        functional(config, ParallelConfig(layers="tensor=3,fsdp").rules())


def test_rows_that_do_not_divide_over_both_axes_are_refused():
    fitting_mesh(run_of("tensor", rows=2), run_model(run_of("tensor", rows=2)), 8)
    run = run_of("tensor=2,fsdp", rows=2)
    with pytest.raises(ShardingError, match='"fsdp": batch = 2 cannot be split 8 ways'):
        fitting_mesh(run, run_model(run), 8)


@pytest.mark.parametrize(
    ("mesh", "fields", "message"),
    [
        ("fsdp=8", {}, "without tensor.*two uses of the mesh axis tensor"),
        ("fsdp=2,tensor=4", {"tensor": "2d"}, "2d.*no features to split"),
        ("context=2,tensor=4", {"context": "by_need"}, "by_need.*one layout of rows"),
    ],
)
def test_what_does_not_go_with_layouts_by_layer(mesh, fields, message):
    run = run_of("tensor=2,fsdp", mesh, **fields)
    with pytest.raises(ConfigError, match=message):
        fitting_mesh(run, run_model(run), 8)


def test_held_out_rows_are_padded_for_the_layers_that_split_them_most():
    mesh = MESH.abstract()
    assert rows_on_mesh(3, mesh, ParallelConfig().rules()) == 4
    assert rows_on_mesh(3, mesh, ParallelConfig(layers="tensor=1,fsdp").rules()) == 8


def test_engines_serve_with_tensor_parallelism_in_all_layers():
    rules = ParallelConfig(layers="tensor=1,fsdp").rules()
    assert serving_rules(rules) == serving_rules(ParallelConfig().rules())


def test_single_layers_are_refused():
    model = functional(tiny.decoder(layers=4), ParallelConfig(layers="tensor=1,fsdp").rules())
    with pytest.raises(ConfigError, match="layouts of their own"):
        model.group(0, {}, jnp.zeros((1, 1, 16)), jnp.zeros((1, 1), int), 0, Segments(None))


def test_layers_of_fsdp_gather_weights_and_split_rows():
    """The traced program: shapes of a device's hidden states in each loop over layers."""
    model = functional(
        tiny.decoder(heads=8, kv_heads=8, layers=4, dtype="float32"), ParallelConfig(layers="tensor=1,fsdp").rules()
    )
    mesh = MESH.abstract()
    params = abstract_params(model.abstract(), model.logical_axes(), mesh, model.rules)
    tokens = jax.ShapeDtypeStruct(
        (8, 16), jnp.int32, sharding=jax.NamedSharding(mesh, model.rules.spec(("batch", "seq"), mesh))
    )
    with jax.sharding.use_abstract_mesh(mesh):
        text = str(jax.make_jaxpr(lambda p, t: model.forward(p, t, t, Segments(None))[0])(params, tokens))
    assert "float32[8@fsdp,16,8@tensor,8]" in text.replace("f32", "float32")
    assert "float32[8@(fsdp,tensor),16,8,8]" in text.replace("f32", "float32")


def test_the_cost_model_refuses_what_it_has_no_formula_for():
    with pytest.raises(NotImplementedError, match="supports tensor, for all layers"):
        DeviceWork.of(run_of("tensor=1,fsdp"), MESH)


def test_collectives_by_formula_are_of_fsdp_and_of_tensor_in_their_layers():
    """Eight devices, full remat: each kind in the layers that have it, and the resharding between them."""
    run = run_of("tensor=1,fsdp=3", sequence=True)
    model = functional(run.model, run.parallel.rules())
    found = expected_collectives(model, MESH.abstract(), run.parallel, rows=8, seq_len=16, proven=False)
    moved = [one for one in found if one.why == "between layouts"]
    assert [(one.kind, one.axes, one.count) for one in moved] == [("all-to-all", ("tensor",), 4)]
    sums = [one for one in found if one.why == "activations" and one.kind == "reduce-scatter"]
    assert sum(one.count for one in sums) == 5  # of one layer; the other three have none
    scattered = [
        one for one in found if one.why == "gradients" and one.axes == ("tensor",) and one.kind == "reduce-scatter"
    ]
    assert scattered
    assert all(one.count % 3 == 0 for one in scattered)  # of the three layers of fsdp
    plan = dataclasses.replace(run.parallel, zero=1)
    with pytest.raises(NotImplementedError, match="zero = 3"):
        expected_collectives(model, MESH.abstract(), plan, rows=8, seq_len=16)
