"""Pages of a request on several devices: refusals, and the joining of parts."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.cli.model_loading import check_span
from jaxllm.infer import EngineConfig
from jaxllm.infer.runner.kv_span import joined, own_pages
from pallas_kernels._pallas import MASK_VALUE
from tests.infer import engines, meshes


@pytest.mark.parametrize(
    "fields",
    [
        {"retention": "window+sinks", "prefix_cache": False},
        {"kv_dtype": "kivi4"},
        {"mla": "tpla"},
        {"chunk_cache": True},
        {"two_phase": True},
        {"overlap": "iso"},
        {"speculate": "tree:x,8"},
        {"layer_window": 1},
        {"stages": 2},
        {"pools": "prefill=tensor:2 x1, decode=tensor:2 x1"},
        {"kv_host_gib": 1.0},
    ],
)
def test_combinations_that_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="kv_span does not go with"):
        EngineConfig(kv_span=True, **fields)  # type: ignore[arg-type]


def test_meshes_that_are_refused() -> None:
    for mesh in (None, "data=8"):
        with pytest.raises(ValueError, match=r"kv_span spreads pages over context, and the mesh .* has none"):
            check_span(True, mesh)
    check_span(False, None)
    check_span(True, "data=2,context=4")
    spread = dataclasses.replace(engines.ENGINES["roomy"], kv_span=True)
    with pytest.raises(ValueError, match="has none: give context=2 or more"):
        engines.build(spread, "llama")
    with pytest.raises(ValueError, match="multi-head latent attention does not go with context=2"):
        meshes.over("context=2", "deepseek_v3", spread)


def test_every_page_is_on_one_device() -> None:
    mesh = jax.make_mesh((4,), ("context",))
    pages = jnp.asarray([0, 1, 2, 3, 4, 11, 12, -1, 99])

    def local(pages: jax.Array) -> jax.Array:
        return own_pages(pages, 3, ("context",))[None]

    found = np.asarray(jax.shard_map(local, mesh=mesh, in_specs=jax.P(), out_specs=jax.P("context"))(pages))
    wanted = np.full((4, 9), 3)
    for at, page in enumerate([0, 1, 2, 3, 4, 11]):
        wanted[page % 4, at] = page // 4
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("sinks", [False, True])
def test_parts_are_joined_to_one_softmax(float64: None, rng: np.random.Generator, sinks: bool) -> None:
    mesh = jax.make_mesh((4,), ("context",))
    scores, values = 3 * rng.normal(size=(4, 5, 2, 6)), rng.normal(size=(4, 6, 7))  # devices, tokens, heads, keys
    sink = rng.normal(size=2) if sinks else None
    scores[1] = -np.inf  # a device without pages of the request
    scores[:, 4] = -np.inf  # a row of padding
    with np.errstate(divide="ignore", invalid="ignore"):
        top = scores.max(-1, keepdims=True)
        weights = np.exp(scores - np.where(np.isfinite(top), top, 0))
        total = weights.sum(-1)
        out = np.einsum("xtns,xsv->xtnv", weights, values) / np.where(total > 0, total, 1)[..., None]
        lse = np.where(total > 0, np.log(total) + top[..., 0], -MASK_VALUE)
    run = jax.shard_map(
        lambda out, lse: joined(out[0], lse[0], None if sink is None else jnp.asarray(sink), ("context",)),
        mesh=mesh, in_specs=jax.P("context"), out_specs=jax.P(),
    )  # fmt: skip
    every = np.exp(scores)
    below = every.sum((0, 3)) + (0 if sink is None else np.exp(sink))
    wanted = np.einsum("xtns,xsv->tnv", every, values) / np.where(below > 0, below, 1)[..., None]
    spread = (jax.device_put(x, jax.NamedSharding(mesh, jax.P("context"))) for x in (out, lse))
    np.testing.assert_allclose(np.asarray(run(*spread)), wanted, rtol=0, atol=1e-12)
