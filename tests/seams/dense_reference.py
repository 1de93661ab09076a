"""Plain reference of a cache technique: a whole sequence at once, one masked softmax, keys and values as pages hold
them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.infer import Request
from jaxllm.models import functional
from pallas_kernels.paged_attention import PageFormat, Slots
from tests import quick
from tests.infer import engines


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DenseReference:
    """Attention context of one sequence.

    Attributes:
        encoding: KV cache format.
        keep: (positions of entries, position of a query) -> whether it finds them, in layers without a window.
    """

    encoding: str = field(default="plain", metadata={"static": True})
    keep: Callable[[Any, Any], Any] | None = field(default=None, metadata={"static": True})
    is_kv_cache: ClassVar[bool] = True

    def attend(
        self, layer: Any, q: Any, k: Any, v: Any, positions: Any, params: Any, sinks: Any = None
    ) -> tuple[Any, DenseReference]:
        (_, s, n, _), (kv, key_dim) = q.shape, k.shape[2:]
        form = PageFormat(kv, key_dim, params.latent or v.shape[3], v is None, self.encoding)
        held = form.pack(k[0], None if v is None else v[0], k.dtype)
        scales = None if held.scales is None else held.scales[..., None]
        rows = form.unpack(Slots(held.data[:, :, None], scales), k.dtype)[:, :, 0]  # S K W
        keys, values = (jnp.repeat(x, n // kv, axis=1) for x in (form.keys(rows), form.values(rows)))
        scores = jnp.einsum("qnh,snh->nqs", q[0], keys) * params.scale
        if params.softcap is not None:
            scores = params.softcap * jnp.tanh(scores / params.softcap)
        query, entries = jnp.arange(s)[:, None], jnp.arange(s)[None]
        seen = entries <= query
        if params.window is not None:
            seen &= entries > query - params.window
        elif self.keep is not None:
            seen &= self.keep(entries, query)
        scores = jnp.where(seen, scores, -jnp.inf)
        if sinks is not None:
            scores = jnp.concatenate([scores, jnp.broadcast_to(sinks[:, None, None], (n, s, 1))], axis=2)
        weights = jax.nn.softmax(scores, axis=-1)[..., :s]
        return jnp.einsum("nqs,snv->qnv", weights, values)[None], self

    def is_fresh_prefill(self, positions: Any) -> None:
        return None


@functools.cache
def _forward(model: str, context: Any) -> Any:
    made = functional(engines.model_of(model, "float64"))
    positions = jnp.arange(engines.LONGEST, dtype=jnp.int32)[None]
    return quick.jit(lambda p, t: jax.nn.log_softmax(made.head(p, made.forward(p, t, positions, context)[0]))[0])


def error(model: str, context: Any, requests: list[Request]) -> float:
    """The largest difference of a log-probability that was served from the reference's, in float64."""
    worst, count = 0.0, 0
    for request in requests:
        for sequence in request.sequences:
            tokens = np.zeros((1, engines.LONGEST), np.int32)
            tokens[0, : len(sequence.tokens)] = sequence.tokens
            want = np.asarray(_forward(model, context)(engines.params_of(model, "float64"), jnp.asarray(tokens)))
            places = range(len(request.prompt), len(sequence.tokens))
            own = [want[i - 1, sequence.tokens[i]] for i in places]
            worst = max(worst, float(np.abs(np.subtract(own, sequence.logprobs)).max(initial=0)))
            count += len(own)
    assert count > 20
    return worst
