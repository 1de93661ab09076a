"""Flash attention in plain JAX, in float64, against a loop over queries and against finite differences.

Bands and blocks are made tiny here, so that short sequences cross many of them.

Legend: B batch, S queries, T keys, N query heads, K kv heads, H head dim of keys, V of values.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

from pallas_kernels.flash_attention import RESIDUALS, flash_attention
from tests import environment
from tests.kernels import flash_body
from tests.kernels.flash_body import CASES, Case, draw, error, forward_and_vjp, lse_error, oracle, static

implementations = pytest.mark.parametrize("implementation", flash_body.PLAIN)


cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@pytest.fixture(autouse=True)
def small_pieces():
    with flash_body.small_pieces():
        yield


@pytest.mark.drawn(0.3)
@cases
def test_forward_is_the_loop_and_vjp_the_references(case, rng, float64):
    """One program of each implementation: its output and logsumexp, and the gradients through both of them."""
    inputs, extra = draw(rng, case)
    want, want_lse = oracle(*inputs[:3], **{name: np.asarray(x) for name, x in extra.items()}, **static(case))
    some = want_lse > -np.inf
    d_lse = jnp.asarray(np.where(some, rng.normal(size=want_lse.shape), 0.0))
    found = {}
    for implementation in flash_body.PLAIN:
        run = flash_body.program(implementation, True, **static(case))
        found[implementation] = (out, lse), *_ = run(*inputs, d_lse, extra)
        assert out.dtype == lse.dtype == jnp.float64
        assert error(out, want) <= 1e-14, implementation
        # No visible key: zeros exactly, not an average of what must not be seen.
        np.testing.assert_array_equal(np.asarray(out)[(want == 0).all(-1)], 0.0)
        assert lse_error(np.asarray(lse)[some], want_lse[some]) <= 1e-14, implementation
        np.testing.assert_array_equal(np.asarray(lse)[~some], -np.inf)
    got, reference = ((out, *gradients) for (out, _), *gradients in found.values())
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(got))
    assert error(got, reference) <= 1e-14  # together: a lone token has hardly a gradient in q and k


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize("name", ["packed", "few queries, many keys", "everything"])
def test_vjp_through_the_logsumexp(name, rng, float64):
    """A query that sees nothing has none; whatever comes back through it, nan included, goes nowhere."""
    case = CASES[name]
    inputs, extra = draw(rng, case)
    _, lse = oracle(*inputs[:3], **{n: np.asarray(x) for n, x in extra.items()}, **static(case))
    clean = np.where(lse == -np.inf, 0.0, rng.normal(size=lse.shape))
    dirty = np.where(lse == -np.inf, np.nan, clean)
    d_lse = {"xla": clean if case.s <= 3 else dirty, "reference": clean}
    got, want = (
        forward_and_vjp(which, inputs, extra, jnp.asarray(d), **static(case))[1:] for which, d in d_lse.items()
    )
    assert error(got, want) <= 1e-14
    without = forward_and_vjp("reference", inputs, extra, **static(case))[1:]
    assert error(got[0], without[0]) > 0.01


@pytest.mark.drawn(0.3)
@implementations
@pytest.mark.parametrize("name", ["odd length", "packed", "few queries, many keys", "everything"])
def test_vjp_is_the_derivative(implementation, name, rng, float64):
    case = CASES[name]
    (q, k, v, _), extra = draw(rng, case)
    arrays = (q, k, v, extra.pop("sinks")) if case.sinks else (q, k, v)

    def call(q, k, v, sinks=None):
        return flash_attention(q, k, v, sinks=sinks, implementation=implementation, **extra, **static(case))

    check_grads(jax.jit(call), arrays, order=1, modes=["rev"], atol=1e-6, rtol=1e-6)


@pytest.mark.drawn(0.3)
@implementations
@pytest.mark.parametrize(("dtype", "bound"), [(np.float32, 1e-6), (jnp.bfloat16, 2**-7)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["odd length", "positions and segments", "one query, many keys", "everything"])
def test_lower_precision(implementation, dtype, bound, name, rng):
    inputs, extra = draw(rng, CASES[name])
    low = [x.astype(dtype) for x in inputs]
    options = static(CASES[name])
    if "sinks" in extra:
        extra["sinks"] = extra["sinks"].astype(dtype)
    got = forward_and_vjp(implementation, low, extra, **options)
    assert all(x.dtype == dtype for x in jax.tree.leaves(got))
    assert error(got[0], oracle(*low[:3], **{n: np.asarray(x) for n, x in extra.items()}, **options)[0]) <= bound
    if "sinks" in extra:
        extra["sinks"] = extra["sinks"].astype(np.float32)
    exact = forward_and_vjp("reference", [x.astype(np.float32) for x in low], extra, **options)
    assert error(got[1:], exact[1:]) <= 2 * bound


@implementations
def test_same_twice(implementation, rng):
    inputs, extra = draw(rng, CASES["packed"], np.float32)
    first, second = (forward_and_vjp(implementation, inputs, extra) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)


@implementations
def test_a_document_is_bit_for_bit_its_own(implementation, rng, float64):
    """The contents of other documents of a packed row do not reach this one."""
    (q, k, v, d_out), _ = draw(rng, Case(1, 16, 16, 2, 1, 4))
    segments = jnp.asarray([[1] * 5 + [2] * 7 + [0] * 4])
    extra = {"q_segment_ids": segments, "kv_segment_ids": segments}
    mine = (segments == 2)[..., None, None]
    one = forward_and_vjp(implementation, [q, k, v, d_out * mine], extra)
    changed = [jnp.where(mine, x, 7 * x + 1) for x in (q, k, v)]
    other = forward_and_vjp(implementation, [*changed, d_out * mine], extra)
    for a, b in zip(one, other, strict=True):
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            np.testing.assert_array_equal(np.asarray(x)[:, 5:12], np.asarray(y)[:, 5:12])


@implementations
def test_large_scores_do_not_overflow(implementation, rng):
    (q, k, v, d_out), extra = draw(rng, CASES["odd length"], np.float32)
    got = forward_and_vjp(implementation, [q, k, v, d_out], extra, scale=1e4)
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(got))


@implementations
def test_scale(implementation, rng, float64):
    (q, k, v, _), extra = draw(rng, CASES["packed"])
    got = jax.jit(functools.partial(flash_attention, scale=0.3, implementation=implementation))(q, k, v, **extra)
    want, _ = oracle(q * 0.3 * 2, k, v, **{name: np.asarray(x) for name, x in extra.items()})  # H = 4: 1/2 by default
    assert error(got, want) <= 1e-14


@pytest.mark.drawn(0.3)
def test_memory_is_linear_in_the_sequence(monkeypatch):
    from pallas_kernels.flash_attention import xla

    monkeypatch.setattr(xla, "MIN_BAND", 16)
    monkeypatch.setattr(xla, "KV_BLOCK", 32)

    def temporary(s: int) -> int:
        q, k = (jax.ShapeDtypeStruct((1, s, heads, 4), jnp.float32) for heads in (4, 2))
        segments = jax.ShapeDtypeStruct((1, s), jnp.int32)

        def gradients(q, k, v, segments):
            loss = lambda *x: flash_attention(*x, q_segment_ids=segments, kv_segment_ids=segments).sum()  # noqa: E731
            return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)

        return (
            jax.jit(gradients)
            .lower(q, k, k, segments)
            .compile(environment.AS_EVER)
            .memory_analysis()
            .temp_size_in_bytes
        )

    small, large = temporary(128), temporary(512)
    assert large < 5 * small  # S x S would be 16
    assert large < 4 * 512 * 512  # one head's scores in float32


def test_residuals_are_what_a_checkpoint_keeps(rng, float64):
    """If they are saved by name, the forward pass is not run again."""
    (q, k, v, d_out), extra = draw(rng, CASES["packed"])

    def count_exps(policy) -> int:
        call = jax.checkpoint(functools.partial(flash_attention, **extra), policy=policy)
        return str(jax.make_jaxpr(lambda *x: jax.vjp(call, *x)[1](d_out))(q, k, v)).count(" exp ")

    policies = jax.checkpoint_policies
    kept, recomputed = count_exps(policies.save_only_these_names(*RESIDUALS)), count_exps(policies.nothing_saveable)
    assert kept < recomputed


@implementations
def test_the_mesh_of_arrays_need_not_be_current(implementation, rng, float64):
    """Gradients of arrays on a mesh, outside of ``jax.set_mesh``: those without a mesh."""
    inputs, _ = draw(rng, Case(2, 7, 7, 4, 2, 4))
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:1])
    placed = [jax.device_put(x, jax.NamedSharding(mesh, P("data"))) for x in inputs]
    got, want = (jax.device_get(forward_and_vjp(implementation, x, {})) for x in (placed, inputs))
    jax.tree.map(np.testing.assert_array_equal, got, want)


@implementations
def test_inside_shard_map_with_shared_keys(implementation, rng, float64):
    """Queries vary over both mesh axes, keys and values over one: their gradients are summed over the other."""
    (q, k, v, d_out), _ = draw(rng, Case(2, 7, 7, 8, 1, 4))
    segments = jnp.ones((2, 7), jnp.int32)
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    by_head, by_row = P("data", None, "tensor"), P("data")

    sinks = jnp.asarray(rng.normal(size=8))
    split = P("tensor")

    def attend(q, k, v, sinks, segments):
        masks = {"q_segment_ids": segments, "kv_segment_ids": segments}
        return flash_attention(q, k, v, sinks=sinks, **masks, implementation=implementation)

    @jax.jit
    def run(q, k, v, d_out, sinks, segments):
        mapped = jax.shard_map(attend, in_specs=(by_head, by_row, by_row, split, by_row), out_specs=by_head)
        out, pull = jax.vjp(lambda *x: mapped(*x, segments), q, k, v, sinks)
        return out, *pull(d_out)

    with jax.set_mesh(mesh):
        placed = [jax.reshard(x, s) for x, s in ((q, by_head), (k, by_row), (v, by_row), (d_out, by_head))]
        got = jax.device_get(run(*placed, jax.reshard(sinks, split), jax.reshard(segments, by_row)))
    want = forward_and_vjp("reference", [q, k, v, d_out], {"sinks": sinks})
    assert all(error(a, b) <= 1e-14 for a, b in zip(got, want, strict=True))


def test_what_does_not_go_together_is_refused():
    q, k = jnp.zeros((1, 3, 6, 2)), jnp.zeros((1, 3, 4, 2))
    with pytest.raises(ValueError, match=r"4 kv heads do not divide 6.*\[1, 2, 3, 6\]"):
        flash_attention(q, k, k)
    long = jnp.zeros((1, 5, 6, 2))
    with pytest.raises(ValueError, match=r"3 queries and 5 keys.*give q_positions"):
        flash_attention(q, long, long)
    ids = jnp.zeros((1, 3), jnp.int32)
    with pytest.raises(ValueError, match="kv_segment_ids is missing"):
        flash_attention(q, q, q, q_segment_ids=ids)
    with pytest.raises(ValueError, match="q_positions is missing"):
        flash_attention(q, q, q, kv_positions=ids)
    with pytest.raises(ValueError, match=r"no implementation 'cuda'.*'reference', 'xla'\]"):
        flash_attention(q, q, q, implementation="cuda")
