"""Exchange of rows between the shards of experts: any routing in any number of rounds is what one device computes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.models.moe.expert_dispatch import dispatch_and_combine
from jaxllm.models.moe.expert_exchange import receive_rows
from jaxllm.models.moe.moe import MoeConfig, _feed_forward
from tests import quick

TOKENS, EMBED, HIDDEN, CHOICES = 9, 6, 3, 2


def chosen_experts(kind: str, tokens: int, experts: int, shards: int, rng) -> np.ndarray:
    """Two experts of each token: "any", all of "one shard", or as one shard's tokens choose only the "last" ones."""
    own = experts // shards
    if kind == "any":
        return np.stack([rng.permutation(experts)[:CHOICES] for _ in range(tokens)])
    if kind == "one shard":
        return np.tile([own, own + 1] if own > 1 else [1, 0], (tokens, 1))
    last = np.tile([experts - 1, experts - 2], (tokens, 1))
    rest = chosen_experts("any", tokens, experts, shards, rng)
    return np.where(np.arange(tokens)[:, None] < tokens // shards, last, rest)


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize(("shards", "own"), [(2, 2), (4, 1), (4, 2)])
@pytest.mark.parametrize("room", [None, 5, 16])
def test_is_that_of_one_device(shards, own, room, rng, float64):
    """Outputs and gradients of rows, weights, matrices and biases."""
    experts, tokens = shards * own, shards * TOKENS
    config = MoeConfig(experts=experts, top_k=CHOICES, hidden=HIDDEN, bias=True, clamp=2.0, up_offset=1.0)
    run = functools.partial(_feed_forward, config)
    inwards, outwards = (experts, EMBED, HIDDEN), (experts, HIDDEN, EMBED)
    shapes = {"gate": inwards, "up": inwards, "down": outwards}
    params = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    params |= {f"{name}_bias": rng.normal(size=(experts, shape[2])) for name, shape in shapes.items()}
    mesh = jax.make_mesh((shards,), ("expert",), devices=jax.devices()[:shards])
    split = jax.P("expert")

    def local(x, weights, params, chosen):
        return dispatch_and_combine(x, chosen, weights, run, params, own, expert_axes=("expert",), room=room)

    def whole(x, weights, params, chosen):
        return dispatch_and_combine(x, chosen, weights, run, params, experts)

    def both(run, x, weights, params, chosen, d_out):
        out, pull = jax.vjp(lambda *args: run(*args, chosen), x, weights, params)
        return out, pull(d_out)

    there = jax.shard_map(local, mesh=mesh, in_specs=(split,) * 4, out_specs=split)
    there, whole = (quick.jit(functools.partial(both, one)) for one in (there, whole))
    for kind in ("any", "one shard", "last"):
        x, weights = rng.normal(size=(tokens, EMBED)), rng.random((tokens, CHOICES))
        chosen = chosen_experts(kind, tokens, experts, shards, rng)
        args = (x, weights, params, chosen, rng.normal(size=(tokens, EMBED)))
        want = whole(*jax.tree.map(jnp.asarray, args))
        with jax.set_mesh(mesh):
            got = there(*jax.device_put(args, jax.NamedSharding(mesh, split)))
        assert np.abs(want[0]).max() > 0.1
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-11), got, want)


def test_a_receive_buffer_does_not_grow_with_the_shards():
    assert receive_rows(16_384, 8) == receive_rows(16_384, 64) == 20_480  # a quarter more than the average
    assert receive_rows(16_384, 1) == 16_384
    assert receive_rows(100, 8) == 800  # few rows: all that may come
    assert receive_rows(100, 64) == 1024
