"""Pallas kernels of linear cross-entropy, interpreted, by the shared test body.

TPU kernels run in TPU interpret mode, with races detected and memory full of nan.
"""

from __future__ import annotations

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import explain
from pallas_kernels._compat import interpreting
from pallas_kernels.cross_entropy import config, linear_cross_entropy, pallas_gpu
from tests.kernels import cross_entropy_body
from tests.kernels.cross_entropy_body import CASES, PALLAS, Case, draw, errors, floors, oracle

implementations = pytest.mark.parametrize("implementation", PALLAS)
small_pieces = pytest.mark.usefixtures("pieces")


@pytest.fixture
def pieces():
    with cross_entropy_body.small_pieces():
        yield


@pytest.mark.drawn(0.3)
@small_pieces
@implementations
@pytest.mark.parametrize("name", ["one of everything", "everything"])
def test_shared_body(implementation, name, rng):
    cross_entropy_body.check(implementation, CASES[name], rng)


@pytest.mark.drawn(0.5)
@small_pieces
@implementations
@hypothesis.settings(max_examples=1, phases=[hypothesis.Phase.generate])
@hypothesis.given(
    case=st.builds(
        Case,
        t=st.integers(1, 20),
        d=st.integers(1, 12),
        v=st.integers(1, 40),
        z_loss=st.sampled_from([0.0, 0.1]),
        softcap=st.sampled_from([None, 2.0]),
    ),
    seed=st.integers(0, 2**32 - 1),
)
def test_drawn_shapes(implementation, case, seed):
    cross_entropy_body.check(implementation, case, np.random.default_rng(seed))


@pytest.mark.drawn(0.3)
@implementations
def test_bfloat16_in_the_blocks_of_a_real_model(implementation, rng):
    """SmolLM2-135M's embedding; tokens and ids that fit no block."""
    cross_entropy_body.check(implementation, Case(300, 576, 1100, 1e-4), rng, jnp.bfloat16, 2**-7)


@pytest.mark.drawn(0.5)
@small_pieces
def test_vocabulary_split_over_a_mesh(rng):
    """Tokens over `data`, the vocabulary over `tensor`: values and gradients are those of one device.

    The GPU's interpreter knows nothing of varying axes; cross_entropy_aot.py compiles that kernel inside a shard_map.
    """
    arguments = hidden, head, targets, weights = draw(rng, 10, 5, 12, np.float32)
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    rows, vocab = P("data"), P("tensor")
    options = {"z_loss": 0.1, "softcap": 1.5, "vocab_axis": "tensor", "implementation": "pallas_tpu"}
    local = functools.partial(linear_cross_entropy, **options)

    def sums(hidden, head, weights, targets):
        per_shard = lambda h, w, t, m: jax.lax.psum(local(h, w, t, m), "data")  # noqa: E731
        mapped = jax.shard_map(per_shard, in_specs=(rows, vocab, rows, rows), out_specs=P())
        return mapped(hidden, head, targets, weights)

    with jax.set_mesh(mesh), interpreting():
        placed = [jax.reshard(x, s) for x, s in ((hidden, rows), (head, vocab), (weights, rows), (targets, rows))]
        run = jax.jit(jax.value_and_grad(sums, argnums=(0, 1, 2), has_aux=True))
        (loss, stats), grads = jax.device_get(run(*placed))
    want_sums, want_grads = oracle(*arguments, 0.1, 1.5)
    of_sums, of_grads = floors(*arguments)
    assert errors((loss, *stats), want_sums, of_sums) <= 1e-6
    assert errors(grads, want_grads, of_grads) <= 1e-6


@pytest.mark.parametrize("kind", ["TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x"])
def test_blocks_fit(kind):
    for embed, item in ((576, 2), (2048, 2), (4096, 2), (5120, 2), (2048, 4)):
        blocks = config.tpu_blocks(kind, embed, item)
        limit = blocks.vmem_bytes or 16 * 2**20
        assert embed * (blocks.tokens * (2 * item + 8) + blocks.vocab * 2 * item) < limit
        assert embed * (blocks.vocab_back * (4 * item + 4) + blocks.tokens_back * 2 * item) < limit


def test_named_kernels_do_not_fall_back(rng):
    arguments = draw(rng, 3, 4, 5, np.float32)
    with pytest.raises(NotImplementedError, match="pallas_tpu needs a TPU, not cpu"):
        linear_cross_entropy(*arguments, implementation="pallas_tpu")
    with pytest.raises(NotImplementedError, match="pallas_gpu needs a GPU, not cpu"):
        linear_cross_entropy(*arguments, implementation="pallas_gpu")


@implementations
def test_limits_are_named(implementation, float64, monkeypatch, rng):
    arguments = draw(rng, 3, 4, 5, np.float32)
    call = functools.partial(linear_cross_entropy, implementation=implementation)
    with interpreting():
        with pytest.raises(NotImplementedError, match=r"not hidden float64\[3, 4\], head float64\[5, 4\]"):
            call(*draw(rng, 3, 4, 5))
        with pytest.raises(NotImplementedError, match="tokens' logits; chunk = 2"):
            call(*arguments, chunk=2)
        if implementation == "pallas_gpu":
            monkeypatch.setattr(pallas_gpu, "MAX_ELEMENTS", 20)
            with pytest.raises(NotImplementedError, match=r"fewer than 2\^31 elements: .* head \[5, 4\]"):
                call(*arguments)
        else:
            hidden, head = jnp.zeros((3, 2**17), jnp.float32), jnp.zeros((5, 2**17), jnp.float32)
            with pytest.raises(
                NotImplementedError, match=r"128 rows of 131072 columns of float32 \(hidden \[3, 131072"
            ):
                call(hidden, head, *arguments[2:])


def test_none_chooses_plain_jax():
    on_tpu, on_gpu = (explain("linear_cross_entropy", platform=name) for name in ("tpu", "gpu"))
    assert "pallas_tpu: compared with float64 in interpret mode" in on_tpu
    assert on_gpu.startswith("linear_cross_entropy on gpu: xla")
    assert "pallas_gpu: compared with float64 in interpret mode" in on_gpu
