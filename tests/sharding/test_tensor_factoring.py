"""2D tensor parallelism: which meshes ``tensor`` factors into, how rules split over them, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest

from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.train.run import fitting_mesh
from jaxllm.train.run_model import run_model
from sharding import DEFAULT, MeshSpec, ShardingError
from sharding.tensor_factoring import TensorFactoring, legal
from tests.train.feature_pairs import BASE


@pytest.mark.parametrize(
    ("mesh", "tensor", "factored"),
    [
        ("tensor=8", "2d", "features=2,tensor=4"),
        ("tensor=8", "4x2", "features=4,tensor=2"),
        ("fsdp=2,tensor=4", "2d", "fsdp=2,features=2,tensor=2"),
        ("data=3,tensor=64", "2d", "data=3,features=8,tensor=8"),
        ("tensor=12", "2d", "features=3,tensor=4"),
        ("tensor=64", "4 x 16", "features=4,tensor=16"),
        ("fsdp=8", "1d", "fsdp=8"),
        ("features=2,tensor=4", "2d", "features=2,tensor=4"),
        ("features=2,tensor=4", "2x4", "features=2,tensor=4"),
    ],
)
def test_the_axis_is_factored(mesh, tensor, factored):
    assert str(ParallelConfig(tensor=tensor).factored(MeshSpec.parse(mesh))) == factored


@pytest.mark.parametrize(
    ("mesh", "tensor", "message"),
    [
        ("tensor=8", "3x3", "is 9 devices.*tensor=8.*nearest factorings of 8 are '2x4', '4x2'"),
        ("tensor=7", "2d", "no two factors above 1.*such as 6, 8, 9"),
        ("fsdp=8", "2d", "tensor=1 has no two factors"),
        ("features=2,tensor=4", "4x2", "has features already"),
    ],
)
def test_illegal_factorings_name_legal_ones(mesh, tensor, message):
    with pytest.raises(ShardingError, match=message):
        ParallelConfig(tensor=tensor).factored(MeshSpec.parse(mesh))


@pytest.mark.parametrize("text", ["", "3d", "1x8", "8x1", "2x", "x4", "2x2x2", "0x4"])
def test_text_that_is_no_factoring(text):
    with pytest.raises(ShardingError, match='give "1d", "2d"'):
        ParallelConfig(tensor=text)


def test_factorings_are_all_and_the_nearest_to_square_first():
    for size in range(1, 65):
        found = legal(size)
        assert all(one.features * one.tensor == size for one in found)
        assert len(found) == sum(size % n == 0 for n in range(2, size))
        if found:
            assert str(ParallelConfig(tensor="2d").factored(MeshSpec((("tensor", size),)))) == (
                f"features={found[0].features},tensor={found[0].tensor}"
            )
            assert found[0].features <= found[0].tensor
            assert TensorFactoring.parse(str(found[-1])) == found[-1]


def test_weights_are_split_over_both_axes_and_rows_of_activations_over_one():
    mesh = MeshSpec.parse("fsdp=2,features=2,tensor=2").abstract()
    assert str(DEFAULT.spec(("embed", "mlp"), mesh)) == str(DEFAULT.spec(("embed", "heads"), mesh))
    assert DEFAULT.spec(("embed", "mlp"), mesh)[0] == ("features", "fsdp")
    assert tuple(DEFAULT.spec(("embed", "mlp"), mesh, gathered=True)) == ("features", "tensor")
    assert tuple(DEFAULT.spec(("batch", "residual_seq", "act_embed"), mesh)) == ("fsdp", None, "features")
    assert DEFAULT.spec(("batch", "seq", "act_mlp"), mesh)[2] == ("tensor", "features")


def test_a_factoring_that_the_model_does_not_fit_names_those_that_it_fits():
    """Sixteen features over three parts: the error has the reason, and other values of parallel.tensor."""
    run = dataclasses.replace(BASE, mesh="tensor=12", parallel=dataclasses.replace(BASE.parallel, tensor="3x4"))
    block = run.model.pattern[0]
    attention = dataclasses.replace(block.attention, heads=12, kv_heads=12)
    block = dataclasses.replace(block, attention=attention, mlp=dataclasses.replace(block.mlp, hidden=48))
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, pattern=(block,), vocab_size=48))
    message = 'embed = 16 cannot be split 3 ways.*With parallel.tensor one of "4x3", "2x6"'
    with pytest.raises(ShardingError, match=message):
        fitting_mesh(run, run_model(run), 12)


def test_a_factoring_of_other_devices_says_nothing_about_meshes() -> None:
    """The mesh is one of these devices, and its factoring is what is wrong."""
    config = dataclasses.replace(BASE, mesh="tensor=8", parallel=ParallelConfig(tensor="3x3"))
    with pytest.raises(ShardingError, match=r"is 9 devices.*nearest factorings of 8 are '2x4', '4x2'") as told:
        fitting_mesh(config, run_model(config), 8)
    assert "mesh of 8 devices" not in str(told.value)
    assert "meshes of 8 devices" not in str(told.value)
