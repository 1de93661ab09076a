"""Star sums: the sum of an all-reduce through one device, where its limit says that it is no slower than a ring."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharding
from jaxllm.config import ConfigError
from jaxllm.infer import EngineConfig
from jaxllm.infer.runner.serving_mesh import check_star, mesh_of
from jaxllm.plan.unequal.link_benchmark import LinkRates
from sharding.star_sum import ring_seconds, star_limit, star_seconds, star_sum


@pytest.mark.parametrize("devices", [1, 2, 3, 8])
def test_it_is_the_sum_on_every_device(devices, rng, float64):
    """To the bit the sum in the devices' order, where an all-reduce promises no order."""
    mesh = jax.make_mesh((devices,), ("tensor",), devices=jax.devices()[:devices])
    x = rng.normal(size=(devices, 5, 3))
    placed = jax.device_put(x, jax.NamedSharding(mesh, jax.P("tensor")))
    run = jax.jit(
        jax.shard_map(
            lambda x: star_sum(x, "tensor"), mesh=mesh, in_specs=jax.P("tensor"), out_specs=jax.P("tensor"),
            check_vma=False,
        )
    )  # fmt: skip
    want = x[0].copy()
    for row in x[1:]:
        want += row
    assert np.array_equal(np.asarray(run(placed)), np.broadcast_to(want, x.shape))
    assert run.lower(placed).as_text().count("collective_permute") == 2 * (devices - 1)


def test_its_limit_is_where_both_take_as_long():
    """Against the seconds of both, below and above; never for two devices, whose ring has as many messages."""
    for devices in (2, 3, 4, 8, 64):
        for hop, link in ((1e-3, 1e8), (1e-6, 5e10)):
            rates = {"hop": hop, "link": link}
            limit = star_limit(devices, **rates)
            assert (limit == 0) == (devices == 2)
            for size in (0, limit // 2, limit, limit + 2, 2 * limit + 1000):
                faster = star_seconds(size, devices, **rates) <= ring_seconds(size, devices, **rates) * (1 + 1e-12)
                assert faster == (size <= limit or (devices == 2 and size == 0))
    # Eight machines with a millisecond between them, at 1 Gbit/s: 122 KB.
    assert star_limit(8, hop=1e-3, link=1.25e8) == int(48 * 1e-3 * 1.25e8 / 49)


def test_small_results_of_matmuls_go_through_it_and_large_ones_do_not(rng):
    mesh = sharding.MeshSpec.parse("tensor=4").build(jax.devices()[:4])
    w = rng.normal(size=(16, 8)).astype(np.float32)

    def run(rows: int, most: int) -> tuple[np.ndarray, str]:
        rules = dataclasses.replace(sharding.DEFAULT, star_bytes=most)
        x = rng.normal(size=(1, rows, 16)).astype(np.float32)
        with sharding.use_mesh(mesh), sharding.use_rules(rules):
            place = jax.NamedSharding(mesh, jax.P("tensor", None))
            there = jax.device_put(w, place), jax.device_put(x, jax.NamedSharding(mesh, jax.P(None, None, "tensor")))
            program = jax.jit(lambda w, x: sharding.project(x, w, ("batch", None, None))).lower(*there).compile()
            out = np.asarray(program(*there))
        np.testing.assert_allclose(out, x @ w, rtol=1e-5, atol=1e-5)
        return out, program.as_text()

    for rows, most, star in ((3, 3 * 8 * 4, True), (4, 3 * 8 * 4, False), (3, 0, False)):
        _, text = run(rows, most)
        assert ("all-reduce" not in text) == star
        assert ("collective-permute" in text) == star


def test_what_it_does_not_go_with_and_what_the_link_benchmark_says():
    with pytest.raises(ConfigError, match="0 or more"):
        EngineConfig(star_bytes=-1)
    with pytest.raises(ConfigError, match="pools"):
        EngineConfig(star_bytes=1, pools="prefill=1, decode=1")
    with pytest.raises(sharding.ShardingError, match="give tensor=3 or more"):
        check_star(None, 1)
    with pytest.raises(sharding.ShardingError, match="star sums"):
        check_star(mesh_of("data=8"), 1)
    check_star(mesh_of("tensor=2,data=4"), 1)
    slow, fast = 1.25e8, 1e9
    rates = LinkRates(
        ("a", "b", "c"),
        ((jnp.inf, fast, slow), (fast, jnp.inf, fast), (slow, fast, jnp.inf)),
        ((0.0, 1e-3, 2e-3), (1e-3, 0.0, 1e-3), (2e-3, 1e-3, 0.0)),
    )
    limit = star_limit(3, hop=2e-3, link=slow)
    assert f"--star-bytes {limit}" in rates.table()
    two = LinkRates(("a", "b"), ((jnp.inf, fast), (fast, jnp.inf)), ((0.0, 1e-3), (1e-3, 0.0)))
    assert "star" not in two.table()
