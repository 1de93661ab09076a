"""Flash attention by cuDNN: its arguments are those of the operation, and what it does not take is refused by name."""

from __future__ import annotations

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._compat import TargetDevice
from pallas_kernels.flash_attention import flash_attention_and_lse
from tests.kernels.flash_body import error

cudnn = importlib.import_module("pallas_kernels.flash_attention.cudnn")  # the package exports a function of its name
GPU = TargetDevice("gpu", "NVIDIA Test")
B, S, N, K, H = 2, 24, 4, 2, 16


@pytest.fixture
def gpu(monkeypatch):
    """A GPU as the target; what jax computes there with cuDNN, it computes here in plain JAX."""
    monkeypatch.setattr(cudnn, "target_device", lambda: GPU)
    plain = jax.nn.dot_product_attention

    def attend(*arrays, implementation, **options):
        assert implementation == "cudnn"
        exact = plain(*(x.astype(jnp.float32) for x in arrays), implementation="xla", **options)
        return tuple(x.astype(arrays[0].dtype) for x in exact)

    monkeypatch.setattr(jax.nn, "dot_product_attention", attend)


def arrays(rng, dtype):
    """Queries, keys, values."""
    return [jnp.asarray(rng.normal(size=(B, S, heads, H)), dtype) for heads in (N, K, K)]


@pytest.mark.parametrize("options", [{}, {"window": 7, "scale": 0.3}])
def test_arguments_mean_the_same(gpu, rng, options):
    """Results and gradients, in float16; the logsumexp is rounded by jax."""
    q, k, v = arrays(rng, jnp.float16)

    @functools.partial(jax.jit, static_argnums=0)
    def run(name, *operands):
        attend = functools.partial(flash_attention_and_lse, implementation=name, **options)
        out, pull, lse = jax.vjp(attend, *operands, has_aux=True)
        return lse, out, *pull(jnp.cos(out))

    (lse, *found) = run("cudnn", q, k, v)
    (exact, *wanted) = run("reference", *(x.astype(jnp.float32) for x in (q, k, v)))
    assert max(error(a, b) for a, b in zip(found, wanted, strict=True)) < 3e-3
    assert lse.dtype == jnp.float32
    np.testing.assert_allclose(lse, exact, atol=5e-3)


def test_its_logsumexp_has_no_gradient(gpu, rng):
    q, k, v = arrays(rng, jnp.float16)
    attend = functools.partial(flash_attention_and_lse, implementation="cudnn")
    with pytest.raises(NotImplementedError, match="the logsumexp has no gradient"):
        jax.grad(lambda q: jnp.sum(attend(q, k, v)[1]))(q)


def test_what_it_does_not_take_is_named(gpu, rng):
    q, k, v = arrays(rng, jnp.bfloat16)
    ids = jnp.ones((B, S), jnp.int32)
    attend = functools.partial(flash_attention_and_lse, implementation="cudnn")
    with pytest.raises(NotImplementedError, match="cudnn takes no sinks, segment ids, a soft cap"):
        attend(q, k, v, sinks=jnp.ones(N), q_segment_ids=ids, kv_segment_ids=ids, softcap=3.0)
    with pytest.raises(NotImplementedError, match="not float32, bfloat16, bfloat16"):
        attend(q.astype(jnp.float32), k, v)
    with pytest.raises(NotImplementedError, match="one head dim, not 16 and 8"):
        attend(q, k, v[..., :8])


def test_without_the_device_or_the_library_it_says_so(rng, monkeypatch):
    q, k, v = arrays(rng, jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="cudnn needs a GPU, not cpu"):
        flash_attention_and_lse(q, k, v, implementation="cudnn")
    monkeypatch.setattr(cudnn, "target_device", lambda: GPU)

    def missing(*arrays, **options):
        raise RuntimeError("cuDNN not found.")

    monkeypatch.setattr(jax.nn, "dot_product_attention", missing)
    with pytest.raises(NotImplementedError, match=r"cuDNN not found\. Install"):
        flash_attention_and_lse(q, k, v, implementation="cudnn")
