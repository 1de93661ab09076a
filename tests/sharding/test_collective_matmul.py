"""Collective matmuls around a ring against all-gathers, matmuls and reduce-scatters, with gradients, in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from sharding import collective_matmul

rings = pytest.mark.parametrize("size", [2, 3, 8])


def mesh_of(size):
    return jax.make_mesh((size,), ("tensor",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:size])


def check(mesh, function, plain, arguments, specs, out, rng):
    """Values and gradients of both, of one random scalar of the results."""
    placed = [jax.device_put(x, jax.NamedSharding(mesh, s)) for x, s in zip(arguments, specs, strict=True)]
    weigh = [rng.normal(size=x.shape) for x in jax.tree.leaves(jax.eval_shape(plain, *arguments))]

    def scalar(run):
        def loss(*x):
            return sum(jnp.vdot(a, w) for a, w in zip(jax.tree.leaves(run(*x)), weigh, strict=True))

        return jax.value_and_grad(loss, argnums=tuple(range(len(arguments))))

    want = scalar(plain)(*arguments)
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(function, mesh=mesh, in_specs=tuple(specs), out_specs=out)

        def replicated(*x):
            return jax.tree.map(lambda y: jax.reshard(y, P()), mapped(*x))

        got = jax.jit(scalar(replicated))(*placed)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.linalg.norm(a - b) <= 1e-13 * max(np.linalg.norm(b), 1.0)


@pytest.mark.drawn(1)
@rings
def test_gathered_products(size, rng, float64):
    x, up, heads = rng.normal(size=(2, 3 * size, 5)), rng.normal(size=(5, 4 * size)), rng.normal(size=(5, 2 * size, 3))

    def plain(x, up, heads):
        return x @ up, jnp.einsum("bsd,dnh->bsnh", x, heads)

    split = P(None, "tensor"), P(None, "tensor"), P(None, "tensor", None)
    out = P(None, None, "tensor"), P(None, None, "tensor", None)
    check(
        mesh_of(size),
        lambda x, *w: collective_matmul.all_gather_matmul("tensor", x, w),
        plain,
        (x, up, heads),
        split,
        out,
        rng,
    )


@rings
def test_scattered_product(size, rng, float64):
    x, down = rng.normal(size=(2, 3 * size, 4 * size)), rng.normal(size=(4 * size, 5))
    split = P(None, None, "tensor"), P("tensor", None)
    run = lambda x, w: collective_matmul.matmul_reduce_scatter("tensor", x, w)  # noqa: E731
    check(mesh_of(size), run, jnp.matmul, (x, down), split, P(None, "tensor"), rng)


def test_nothing_is_gathered_or_reduced_whole(float64):
    mesh = mesh_of(8)
    x, w = np.ones((1, 16, 8)), np.ones((8, 16))

    def both(x, w):
        (h,) = collective_matmul.all_gather_matmul("tensor", x, (w,))
        return collective_matmul.matmul_reduce_scatter("tensor", h, w.T)

    with jax.set_mesh(mesh):
        split = P(None, "tensor")
        mapped = jax.shard_map(both, mesh=mesh, in_specs=(split, split), out_specs=split)
        run = jax.jit(jax.grad(lambda x, w: mapped(x, w).sum(), argnums=(0, 1)))
        text = run.lower(*(jax.device_put(a, jax.NamedSharding(mesh, split)) for a in (x, w))).compile().as_text()
    assert "collective-permute" in text
    assert "all-gather" not in text
    assert "reduce-scatter" not in text
