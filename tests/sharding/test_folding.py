"""Expert folding: which mesh axes experts get, and what is refused."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from sharding import DEFAULT, MeshSpec, ShardingError
from sharding.folding import FOLDED, Folding, legal


def folded(text: str, mesh: str) -> dict[str, tuple[str, ...]]:
    """Mesh axes of more than one device, by logical axis."""
    built = MeshSpec.parse(mesh).abstract()
    rules = replace(DEFAULT, folding=Folding.parse(text)).on(built)
    names = ("experts", "expert_mlp", "expert_embed", "expert_batch", "expert_seq")
    return {name: tuple(a for a in rules.mesh_axes(name) if built.shape.get(a, 1) > 1) for name in names}


def test_axes_are_taken_from_the_innermost_outwards():
    """The paper's two views of eight devices, and one with replicas of the experts."""
    mesh = "data=2,context=2,tensor=2"
    assert folded("expert=8", mesh) == {
        "experts": ("data", "context", "tensor"),
        "expert_mlp": (),
        "expert_embed": (),
        "expert_batch": ("data",),
        "expert_seq": ("context", "tensor"),
    }
    assert folded("expert=4,tensor=2", mesh) == {
        "experts": ("data", "context"),
        "expert_mlp": ("tensor",),
        "expert_embed": (),
        "expert_batch": ("data",),
        "expert_seq": ("context",),
    }
    assert folded("expert=2", "fsdp=2,context=2,tensor=2") == {
        "experts": ("tensor",),
        "expert_mlp": (),
        "expert_embed": ("fsdp", "context"),
        "expert_batch": ("fsdp",),
        "expert_seq": ("context", "tensor"),
    }
    assert folded("expert=2,tensor=4", "fsdp=2,context=2,tensor=2")["expert_batch"] == ("fsdp",)


def test_every_folding_uses_each_device_once(rng):
    """Expert shards, shards of the width and replicas are all devices; tokens are split over all but the width's."""
    sizes = [1, 2, 3, 4]
    for counts in itertools.product(sizes, repeat=3):
        axes = rng.choice(FOLDED, 3, replace=False).tolist()
        mesh = dict(sorted(zip(axes, counts, strict=True), key=lambda one: FOLDED.index(one[0])))
        present = tuple((axis, n) for axis, n in mesh.items() if n > 1)
        found = legal(present)
        assert found
        for one in found:
            table = one.table(mesh)
            ways = {name: math.prod(mesh.get(a, 1) for a in axes) for name, axes in table.items()}
            assert (ways["experts"], ways["expert_mlp"]) == (one.expert, one.tensor)
            assert ways["expert_batch"] * ways["expert_seq"] * one.tensor == math.prod(counts)
            data = mesh.get("data", 1) if "data" not in (*table["experts"], *table["expert_mlp"]) else 1
            assert ways["expert_embed"] * data * one.expert * one.tensor == math.prod(counts)


@pytest.mark.parametrize(
    ("text", "mesh", "message"),
    [
        ("expert=3", "fsdp=4,tensor=2", "'expert=2', 'expert=4,tensor=2', 'expert=8'|'expert=2'"),
        ("expert=4", "fsdp=4,tensor=2", "whole axes from the innermost"),
        ("tensor=2", "fsdp=4", 'such as "expert=8"'),
        ("expert=0", "fsdp=4", 'such as "expert=8"'),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(text, mesh, message):
    with pytest.raises(ShardingError, match=message):
        folded(text, mesh)
