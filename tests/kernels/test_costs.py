"""Cost estimates of kernels against counts by hand: XLA schedules by them and the program walker reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels._compat import interpreting
from pallas_kernels.cross_entropy import linear_cross_entropy
from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.ring_attention import ring_attention

B, S, N, K, H, V = 2, 40, 4, 2, 16, 8
kernels = pytest.mark.parametrize("implementation", ["pallas_tpu", "pallas_gpu"])


def said(function: Callable[..., Any], *shapes: tuple[int, ...]) -> dict[str, Any]:
    """Cost estimate of each kernel in a function of float32 arrays and its derivatives."""

    def both(*arrays: jax.Array) -> Any:
        out, pull = jax.vjp(function, *arrays)
        return out, pull(out)

    with interpreting():
        jaxpr = jax.make_jaxpr(both)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    calls = [eqn.params for eqn in equations(jaxpr.jaxpr) if eqn.primitive.name == "pallas_call"]
    return {call["name"] or str(call["name_and_src_info"]).split()[0]: call["cost_estimate"] for call in calls}


def equations(jaxpr: Any) -> Iterator[Any]:
    """All of them, in whatever they are nested."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from equations(getattr(inner, "jaxpr", inner))


@kernels
@pytest.mark.parametrize("window", [None, 1, 7, 40, 100])
def test_attention_counts_the_pairs_that_its_mask_leaves(implementation, window):
    def attend(q, k, v):
        return flash_attention(q, k, v, window=window, implementation=implementation)

    found = said(attend, (B, S, N, H), (B, S, K, H), (B, S, K, V))
    distance = np.arange(S)[:, None] - np.arange(S)
    pairs = B * N * int(np.sum((distance >= 0) & (distance < (window or S))))
    assert {name: cost.flops for name, cost in found.items()} == {
        "flash_attention_forward": 2 * pairs * (H + V),
        "flash_attention_d_q": 2 * pairs * (2 * H + V),
        "flash_attention_d_kv": 2 * pairs * (2 * H + 2 * V),
    }
    assert {cost.transcendentals for cost in found.values()} == {pairs}
    least = 4 * B * S * (N * H + K * H + K * V + N * V)
    assert all(least <= cost.bytes_accessed <= 4 * least for cost in found.values())


def test_a_ring_counts_one_devices_share():
    mesh = jax.make_mesh((4,), ("context",), axis_types=(AxisType.Auto,))

    def attend(q, k, v):
        run = lambda q, k, v: ring_attention(q, k, v, axis="context", implementation="pallas_tpu")  # noqa: E731
        part = P(None, "context")
        return jax.shard_map(run, mesh=mesh, in_specs=(part,) * 3, out_specs=part)(q, k, v)

    found = said(attend, (B, S, N, H), (B, S, K, H), (B, S, K, V))
    pairs = B * N * (S * (S + 1) // 2) / 4
    assert {name: cost.flops for name, cost in found.items()} == {
        "ring_attention_forward": 2 * pairs * (H + V),
        "ring_attention_backward": 2 * pairs * (4 * H + 3 * V),
    }


@kernels
def test_grouped_products_are_one_product_of_all_rows(implementation):
    sizes = jnp.asarray([3, 0, 17, 12], jnp.int32)
    found = said(lambda a, b: grouped_matmul(a, b, sizes, implementation=implementation), (32, 24), (4, 24, 16))
    assert {name: cost.flops for name, cost in found.items()} == dict.fromkeys(
        ("grouped_matmul", "grouped_matmul_d_lhs", "grouped_matmul_d_rhs"), 2 * 32 * 24 * 16
    )


def test_the_loss_has_four_products():
    tokens, embed, vocab = 128, 16, 256
    targets = jnp.zeros((tokens,), jnp.int32)
    found = said(
        lambda hidden, head: linear_cross_entropy(hidden, head, targets, jnp.ones(tokens), implementation="pallas_tpu"),
        (tokens, embed),
        (vocab, embed),
    )
    assert {name: cost.flops for name, cost in found.items()} == {
        "cross_entropy": 2 * 2 * tokens * vocab * embed,
        "cross_entropy_d_head": 2 * 2 * tokens * vocab * embed,
    }
