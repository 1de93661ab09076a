"""Sharding rules: logical axes to mesh axes, and errors for what does not fit."""

from __future__ import annotations

import re

import pytest
from jax.sharding import PartitionSpec as P

from sharding import DEFAULT, MeshSpec, Rules, ShardingError


def mesh(text: str):
    return MeshSpec.parse(text).abstract()


@pytest.mark.parametrize(
    ("axes", "on", "gathered", "expected"),
    [
        (("embed", "mlp"), "fsdp=4,tensor=2", False, P("fsdp", "tensor")),
        (("embed", "mlp"), "fsdp=4,tensor=2", True, P(None, "tensor")),
        (("mlp", "embed"), "tensor=2", False, P("tensor", None)),
        (("batch", "seq", "act_embed"), "data=2,fsdp=4", False, P(("data", "fsdp"), None, None)),
        (("batch", None), "fsdp=4", False, P("fsdp", None)),
        (("layers", "vocab", "embed"), "fsdp=2,tensor=4", False, P(None, "tensor", "fsdp")),
        # Axes of size 1 drop out, so a spec never names what the mesh does not split.
        (("embed", "mlp"), "fsdp=1,tensor=2", False, P(None, "tensor")),
        ((), "fsdp=4", False, P()),
    ],
)
def test_logical_axes_become_a_spec(axes, on, gathered, expected):
    assert DEFAULT.spec(axes, mesh(on), gathered=gathered) == expected


def test_an_unknown_logical_axis_names_the_closest():
    with pytest.raises(
        ShardingError, match=r"no sharding rule for the logical axis 'embd'. Did you mean 'embed'\?"
    ) as raised:
        DEFAULT.spec(("embd",), mesh("fsdp=2"))
    assert "act_vocab" in str(raised.value)
    with pytest.raises(ShardingError, match="'head'"):
        DEFAULT.override(head=("tensor",))


@pytest.mark.parametrize(
    ("axis", "size", "on", "nearest"),
    [
        ("heads", 6, "tensor=4", "[2, 3, 6]"),
        ("mlp", 7, "tensor=4", "[1, 7]"),
        ("heads", 2, "tensor=4", "[1, 2]"),  # only kv heads may be replicated
        ("vocab", 1000, "tensor=7", "[4, 5, 8]"),
        ("embed", 12, "fsdp=8", "[4, 6, 12]"),
        ("batch", 9, "data=2,fsdp=2", "[1, 3, 9]"),
    ],
)
def test_an_indivisible_size_names_the_nearest_legal_ones(axis, size, on, nearest):
    with pytest.raises(ShardingError) as raised:
        DEFAULT.spec((None, axis), mesh(on), (3, size), what="blocks/0/w")
    message = str(raised.value)
    assert message.startswith(f"blocks/0/w: {axis} = {size} cannot be split ")
    assert nearest in message
    for part in on.split(","):
        assert part in message
    # What is offered is true.
    for offered in map(int, nearest.strip("[]").split(",")):
        assert size % offered == 0


def test_few_kv_heads_stay_whole_where_the_axis_is_a_multiple():
    axes = ("embed", "kv_heads", "head_dim")
    assert DEFAULT.spec(axes, mesh("tensor=8"), (16, 2, 4)) == P(None, None, None)
    assert DEFAULT.spec(axes, mesh("tensor=2"), (16, 2, 4)) == P(None, "tensor", None)
    with pytest.raises(ShardingError, match=r"kv_heads = 3 cannot be split 4 ways \(tensor=4\)") as raised:
        DEFAULT.spec(axes, mesh("tensor=4"), (16, 3, 4))
    assert "a multiple of 3 (then kv_heads are replicated)" in str(raised.value)
    # More heads than shards that do not divide: not replicable either.
    with pytest.raises(ShardingError, match="kv_heads = 6"):
        DEFAULT.spec(axes, mesh("tensor=4"), (16, 6, 4))


def test_two_dimensions_cannot_share_a_mesh_axis():
    with pytest.raises(ShardingError) as raised:
        DEFAULT.spec(("heads", "mlp"), mesh("tensor=2"), what="fused")
    assert re.search(r"fused: .*'heads' and 'mlp' both map to the mesh axis 'tensor'", str(raised.value))
    # On a mesh that does not split it there is nothing to collide over.
    assert DEFAULT.spec(("heads", "mlp"), mesh("fsdp=2")) == P(None, None)


def test_a_wrong_number_of_axes_is_refused():
    with pytest.raises(ShardingError, match=r"w has shape \(2, 3\) but 1 logical axes"):
        DEFAULT.spec(("embed",), mesh("fsdp=2"), (2, 3), what="w")


def test_override_changes_one_row_of_a_copy():
    rules = DEFAULT.override(act_embed=("tensor",))
    assert rules.spec(("batch", "seq", "act_embed"), mesh("tensor=2")) == P(None, None, "tensor")
    assert DEFAULT.spec(("batch", "seq", "act_embed"), mesh("tensor=2")) == P(None, None, None)
    assert rules.override(act_embed=("features",)) == DEFAULT
    assert hash(rules) != hash(DEFAULT)


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        (lambda: DEFAULT.override(mlp=("tensr",)), "tensr"),
        (lambda: Rules((("embed", ("fsd",)),)), "fsd"),
    ],
)
def test_a_misspelt_mesh_axis_does_not_silently_replicate(make, wrong):
    with pytest.raises(ShardingError, match=f"unknown mesh axis '{wrong}'"):
        make()
