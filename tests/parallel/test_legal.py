"""Errors for illegal meshes: the reason, and the nearest legal meshes."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.models import functional
from jaxllm.parallel.mesh_search import check_parameters, factorings, nearest, resolve
from jaxllm.train import RunConfig
from jaxllm.train.run import fitting_mesh
from recipes.llama3 import llama3_8b
from sharding import MeshSpec, ShardingError
from tests import tiny


def fits_of(model: Any, rows: int):
    """Mesh requirements of a run with ``rows`` rows of 16."""
    shapes, axes = model.abstract(), model.logical_axes()

    def fits(mesh: Any) -> None:
        model.rules.spec(("batch", "seq"), mesh, (rows, 16), what="batch")
        check_parameters(shapes, axes, mesh, model.rules)

    return fits


def small(heads: int = 6) -> Any:
    return functional(tiny.decoder(heads=heads, kv_heads=heads, head_dim=4, embed_dim=24, mlp=24, vocab_size=24))


@given(st.integers(1, 64), st.integers(1, 4))
def test_factorings_are_all_there_is(number, parts):
    found = list(factorings(number, parts))
    assert len(set(found)) == len(found)
    assert all(math.prod(sizes) == number for sizes in found)
    # A prime power p^k has C(k + parts - 1, parts - 1) of them, and they multiply over the primes.
    expected, rest = 1, number
    for prime in range(2, number + 1):
        power = 0
        while rest % prime == 0:
            rest, power = rest // prime, power + 1
        expected *= math.comb(power + parts - 1, parts - 1)
    assert len(found) == expected


@given(
    st.sampled_from(
        ["tensor=6", "tensor=8", "fsdp=3", "data=5,tensor=2", "tensor=16", "fsdp=-1,tensor=3", "context=7"]
    ),
    st.sampled_from([1, 2, 4, 8, 16, 64]),
    st.sampled_from([4, 6, 8, 24]),
)
def test_what_is_listed_is_legal_and_sorted(mesh, devices, rows):
    """Against every mesh over the same axes: none that is nearer is left out."""
    fits, spec = fits_of(small(), rows), MeshSpec.parse(mesh)
    found = nearest(spec, devices, fits, count=3)
    wanted = dict(spec.axes)
    names = [name for name in ("data", "fsdp", "context", "tensor") if name in wanted or name in ("data", "fsdp")]
    legal = []
    for sizes in factorings(devices, len(names)):
        candidate = MeshSpec(tuple(zip(names, sizes, strict=True)))
        try:
            fits(candidate.abstract())
        except ValueError:
            continue
        legal.append(dict(candidate.axes))
    assert len(found) == min(3, len(legal))

    def distance(sizes: dict[str, int]) -> float:
        fixed = math.prod(n for n in wanted.values() if n > 0)
        aim = {name: n if n > 0 else max(1, devices / fixed) for name, n in wanted.items()}
        return sum(abs(math.log2(sizes.get(name, 1) / aim.get(name, 1))) for name in names)

    best = sorted(round(distance(sizes), 6) for sizes in legal)
    assert [round(distance(dict(one.axes)), 6) for one in found] == best[: len(found)]
    for one in found:
        assert math.prod(size for _, size in one.axes) == devices
        assert resolve(one, devices, fits) == one


@pytest.mark.parametrize(
    ("mesh", "heads", "why"),
    [
        ("tensor=6", 6, "the mesh tensor=6 needs 6 devices, but there are 8"),
        ("tensor=8", 6, "heads = 6 cannot be split 8 ways (tensor=8)"),
        ("data=8", 6, "batch = 4 cannot be split 8 ways (data=8)"),
    ],
)
def test_the_message(mesh, heads, why):
    with pytest.raises(ShardingError) as caught:
        resolve(MeshSpec.parse(mesh), 8, fits_of(small(heads), 4))
    message = str(caught.value)
    assert why in message
    first = message.split('that this model and batch fit: "')[1].split('"')[0]
    assert resolve(MeshSpec.parse(first), 8, fits_of(small(heads), 4))
    assert "\n" not in message


def test_where_nothing_fits_it_says_so():
    with pytest.raises(ShardingError, match="No mesh of 7 devices"):
        resolve(MeshSpec.parse("data=7"), 7, fits_of(small(), 4))


def test_a_run_checks_itself_at_once():
    """Also a large one: nothing is compiled or allocated."""
    config = dataclasses.replace(llama3_8b(), mesh="tensor=6,fsdp=10")
    model = functional(config.model)
    began = time.process_time()
    with pytest.raises(ShardingError, match="The nearest meshes of 64 devices that this model and batch fit"):
        fitting_mesh(config, model, 64)
    assert time.process_time() - began < 1.0


def test_a_legal_mesh_is_taken_as_it_is():
    config = RunConfig(mesh="fsdp_tp")
    assert dict(fitting_mesh(config, functional(config.model), 8).axes) == {"fsdp": 4, "tensor": 2}
