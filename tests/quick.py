"""Fast compilation of programs that are compiled once and run on a handful of numbers."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.models import DecoderConfig, Segments, functional

OPTIONS: dict[str, Any] = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 12):  # later ones have no such option
    OPTIONS["xla_cpu_use_fusion_emitters"] = False

jit = functools.partial(jax.jit, compiler_options=OPTIONS)
"""``jax.jit`` whose programs are compiled five times as fast; for arithmetic only, not for claims about programs."""


def params(config: DecoderConfig, seed: int = 0, scale: float = 0.3) -> Any:
    """Random parameters without a compiled draw: gains near 1 and biases near 0, where a mistake would show."""
    model = functional(config)

    def draw(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        rng = np.random.default_rng([seed, *name.encode()])
        return (scale * rng.normal(size=leaf.shape) + name.endswith("gain")).astype(leaf.dtype)

    return jax.tree.map_with_path(draw, model.abstract())


def logits(config: DecoderConfig, params: Any, tokens: np.ndarray) -> np.ndarray:
    """Float[B S V] of whole texts, each row one document."""
    model = functional(config)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    run = jit(lambda p, t: model.head(p, model.forward(p, t, positions, Segments())[0]))
    with mesh_of(params):
        return np.asarray(run(params, jnp.asarray(tokens)))


def mesh_of(params: Any) -> contextlib.AbstractContextManager[Any]:
    """Context of the mesh that parameters lie on, if they lie on one."""
    mesh = getattr(getattr(jax.tree.leaves(params)[0], "sharding", None), "mesh", None)
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)
