"""Linear cross-entropy in plain JAX, by the shared test body; with its vocabulary sharded over a mesh.

Legend: T tokens, D embed, V vocab.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import explain
from pallas_kernels.cross_entropy import config, linear_cross_entropy
from pallas_kernels.cross_entropy.api import IMPLEMENTATIONS
from pallas_kernels.cross_entropy.xla import MAX_LOGITS, MIN_CHUNK, default_chunk
from tests import environment
from tests.kernels import cross_entropy_body
from tests.kernels.cross_entropy_body import CASES, PALLAS, PLAIN, Case, draw, errors, loss_and_grads, oracle

WAYS = {  # implementation, chunk
    "reference": ("reference", None),
    "xla": ("xla", None),
    "xla, chunks of 1": ("xla", 1),
    "xla, odd chunks": ("xla", 5),
    "xla, one chunk": ("xla", 1000),
    "bands": ("xla_bands", None),
    "bands, chunks of 1": ("xla_bands", 1),
    "bands, odd chunks": ("xla_bands", 5),
}
assert {name for name, _ in WAYS.values()} == set(PLAIN)
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def test_every_implementation_is_tested():
    assert {*PLAIN, *PALLAS} == set(IMPLEMENTATIONS)


@pytest.fixture
def pieces():
    with cross_entropy_body.small_pieces():
        yield


CHUNKED = ("odd", "many blocks", "everything")
"""Cases of enough tokens that a given chunk makes a difference, whole chunks and a rest."""


@pytest.mark.drawn(0.3)
@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize(
    ("way", "case"),
    [
        pytest.param(way, case, id=f"{how}-{name}")
        for how, way in WAYS.items()
        for name, case in CASES.items()
        if way[1] is None or name in CHUNKED
    ],
)
def test_is_the_formula(way, case, rng, float64):
    cross_entropy_body.check(way[0], case, rng, np.float64, 1e-13, way[1])


@pytest.mark.drawn(0.3)
@pytest.mark.usefixtures("pieces")
@ways
@pytest.mark.parametrize(("dtype", "bound"), [(np.float32, 1e-6), (jnp.bfloat16, 2**-8)], ids=["float32", "bfloat16"])
def test_lower_precision(way, dtype, bound, rng):
    """Sums are float32 or better whatever the inputs; a bfloat16 gradient is rounded from one that is."""
    cross_entropy_body.check(way[0], Case(23, 16, 37, 0.01), rng, dtype, 2 * bound, way[1])


@ways
def test_large_logits_do_not_overflow(way, rng):
    hidden, head, targets, weights = draw(rng, 9, 4, 6, np.float32)
    implementation, chunk = way
    sums, grads = loss_and_grads((hidden * 1e4, head, targets, weights), chunk=chunk, implementation=implementation)
    assert all(np.isfinite(np.asarray(x)).all() for x in (*sums, *grads))


def test_statistics_have_no_gradient(rng, float64):
    hidden, head, targets, weights = draw(rng, 13, 5, 11)

    def statistics(hidden, head):
        return sum(linear_cross_entropy(hidden, head, targets, weights, chunk=4)[1])

    for grad in jax.grad(statistics, argnums=(0, 1))(hidden, head):
        np.testing.assert_array_equal(grad, 0.0)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("implementation", PLAIN)
@pytest.mark.parametrize("split", [True, False], ids=["vocabulary split", "vocabulary whole"])
def test_on_a_mesh_is_as_on_one_device(implementation, split, rng, float64):
    """Tokens over `data`, the vocabulary over `tensor` or whole: values and gradients are those of one device."""
    hidden, head, targets, weights = draw(rng, 22, 5, 12)
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    rows, vocab = P("data"), P("tensor" if split else None)
    options = {"z_loss": 0.1, "implementation": implementation, "chunk": None if implementation == "reference" else 4}
    local = functools.partial(linear_cross_entropy, vocab_axis="tensor" if split else None, **options)

    def sums(hidden, head, weights, targets):
        # Out unvarying over `tensor` as it is: psum only over the axis that splits the tokens.
        per_shard = lambda h, w, t, m: jax.lax.psum(local(h, w, t, m), "data")  # noqa: E731
        mapped = jax.shard_map(per_shard, in_specs=(rows, vocab, rows, rows), out_specs=P())
        return mapped(hidden, head, targets, weights)

    with jax.set_mesh(mesh):
        placed = [jax.reshard(x, s) for x, s in ((hidden, rows), (head, vocab), (weights, rows), (targets, rows))]
        run = jax.jit(jax.value_and_grad(sums, argnums=(0, 1, 2), has_aux=True))
        (loss, stats), grads = run(*placed)
        assert [jax.typeof(x).sharding.spec[0] for x in grads] == ["data", "tensor" if split else None, "data"]
    want_sums, want_grads = oracle(hidden, head, targets, weights, 0.1)
    assert errors(jax.device_get((loss, *stats)), want_sums) <= 1e-12
    assert errors(jax.device_get(grads), want_grads) <= 1e-12


def test_cpus_take_fewer_products_and_others_fewer_bytes():
    assert explain("linear_cross_entropy", platform="cpu").startswith("linear_cross_entropy on cpu: xla,")
    for platform in ("tpu", "gpu"):
        assert explain("linear_cross_entropy", platform=platform).startswith(
            f"linear_cross_entropy on {platform}: xla_bands,"
        )


@pytest.mark.parametrize("implementation", ["xla", "xla_bands"])
def test_never_all_logits(implementation, monkeypatch):
    monkeypatch.setattr(config, "band_vocab", lambda chunk, vocab: 128)
    tokens, embed, vocab = 2048, 8, 512

    def temporary(tokens: int) -> int:
        hidden, head = (jax.ShapeDtypeStruct((n, embed), jnp.float32) for n in (tokens, vocab))
        targets, weights = (jax.ShapeDtypeStruct((tokens,), dtype) for dtype in (jnp.int32, jnp.float32))
        run = jax.jit(
            jax.grad(lambda *x: linear_cross_entropy(*x, chunk=128, implementation=implementation)[0], argnums=(0, 1))
        )
        return (
            run.lower(hidden, head, targets, weights).compile(environment.AS_EVER).memory_analysis().temp_size_in_bytes
        )

    assert temporary(tokens) < 4 * tokens * vocab / 2
    assert temporary(2 * tokens) - temporary(tokens) < 4 * tokens * vocab / 8


def test_default_chunk():
    assert default_chunk(10, 50) == MIN_CHUNK
    assert default_chunk(4096, 8192) == 512
    assert default_chunk(2**20, 2**17) == MAX_LOGITS // 2**17 == 512
    assert default_chunk(2**20, 2**30) == MIN_CHUNK


def test_bands():
    assert config.band_vocab(10, 50) == 50
    assert config.band_vocab(8192, 128256) == 128256 // 16
    assert config.band_vocab(8192, 256000) == 256000 // 32
    assert config.band_vocab(8192, 50257) == 8192
    assert config.band_vocab(1024, 128256) == 128256 // 2
    assert config.band_vocab(2**20, 50257) == config.MIN_BAND
    assert config.chunk_tokens(100) == 100


def test_what_cannot_be_is_refused(rng):
    arguments = draw(rng, 6, 4, 8, np.float32)
    with pytest.raises(ValueError, match="chunk = 0"):
        linear_cross_entropy(*arguments, chunk=0)
    with pytest.raises(ValueError, match="head does not vary over vocab_axis 'tensor'"):
        linear_cross_entropy(*arguments, vocab_axis="tensor")
    with pytest.raises(NotImplementedError, match="all 6 tokens' logits; chunk = 2"):
        linear_cross_entropy(*arguments, chunk=2, implementation="reference")
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(AxisType.Explicit,))
    local = functools.partial(linear_cross_entropy, vocab_axis="tensor")
    split = jax.shard_map(local, mesh=mesh, in_specs=P("tensor"), out_specs=P())
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="targets or weights vary over vocab_axis"):
        jax.eval_shape(split, *(jax.reshard(x, P("tensor")) for x in arguments))


@pytest.mark.parametrize("implementation", ["xla", "xla_bands"])
def test_gradients_are_multiplied_by_what_comes_in(implementation, rng, float64):
    """Those of three times the loss are three times those of the loss, in every operand."""
    arrays = rng.standard_normal((7, 4)), rng.standard_normal((9, 4)), rng.random(7)
    targets = jnp.asarray(rng.integers(0, 9, 7))

    def loss(hidden: jax.Array, head: jax.Array, weights: jax.Array, times: float) -> jax.Array:
        found, _ = linear_cross_entropy(
            hidden, head, targets, weights, z_loss=0.1, softcap=2.0, chunk=4, implementation=implementation
        )
        return times * found

    grads = jax.jit(jax.grad(loss, (0, 1, 2)), static_argnums=3)
    one, three = (grads(*map(jnp.asarray, arrays), times) for times in (1.0, 3.0))
    for a, b in zip(one, three, strict=True):
        np.testing.assert_allclose(3 * np.asarray(a), b, rtol=0, atol=1e-12)
        assert np.abs(a).max() > 1e-3
