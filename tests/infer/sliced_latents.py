"""Dense reference of attention over latents in slices, independent of the serving code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.models import Functional
from tests import quick


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlicedReference:
    """Attention context of one row whose tokens from ``prompt`` on attend to each slice of the latents by itself."""

    prompt: Any
    is_kv_cache: ClassVar[bool] = True

    def attend(self, *arguments: Any, **named: Any) -> Any:
        raise NotImplementedError

    def self_segments(self, tokens: int) -> Any:
        raise NotImplementedError

    def write_latents(self, layer: Any, k: Any, positions: Any) -> Any:
        raise NotImplementedError

    def is_fresh_prefill(self, positions: Any) -> None:
        return None

    def attend_slices(self, layer: Any, q: Any, k: Any, factors: Any, params: Any) -> Any:
        (q, k), latent, count = (q[0], k[0, :, 0]), params.latent, len(factors)
        size = latent // count
        turned = jnp.einsum("tnr,sr->nts", q[..., latent:], k[:, latent:])
        parts = [
            jnp.einsum("tnc,sc->nts", q[..., i * size : (i + 1) * size], k[:, i * size : (i + 1) * size])
            for i in range(count)
        ]
        seen = jnp.tril(jnp.ones(turned.shape[1:], bool))

        def over(scores: Any, values: Any) -> Any:
            weights = jax.nn.softmax(jnp.where(seen, params.scale * (scores + turned), -jnp.inf), axis=-1)
            return jnp.einsum("nts,sc->tnc", weights, values)

        whole = over(sum(parts), k[:, :latent])
        apart = [
            over(f * part, k[:, i * size : (i + 1) * size])
            for i, (f, part) in enumerate(zip(factors, parts, strict=True))
        ]
        generated = (jnp.arange(len(q)) >= self.prompt)[:, None, None]
        return jnp.where(generated, jnp.concatenate(apart, axis=-1), whole)[None], self


def logprobs(model: Functional, length: int) -> Any:
    """Function of (params, tokens[S], prompt) to log-probabilities Float[S V], with tokens padded to ``length``."""
    positions = jnp.arange(length, dtype=jnp.int32)[None]

    def run(params: Any, tokens: Any, prompt: Any) -> Any:
        hidden, _ = model.forward(params, tokens[None], positions, SlicedReference(prompt))  # type: ignore[arg-type]
        return jax.nn.log_softmax(model.head(params, hidden), axis=-1)[0]

    made = quick.jit(run)

    def padded(params: Any, tokens: list[int], prompt: int) -> np.ndarray:
        row = np.zeros(length, np.int32)
        row[: len(tokens)] = tokens
        return np.asarray(made(params, jnp.asarray(row), jnp.int32(prompt)))[: len(tokens)]

    return padded
