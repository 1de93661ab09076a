"""Attention seam: attention contexts that cut a block in two at the place where it calls its attention.

A block gives its queries, keys and values to ``attend`` of the attention context, and goes on with the result. Run with
a ``CallRecorder`` it gives them to the caller; run again with ``AttendedResult`` it goes on with a result that somebody
else has computed. What the second run does not need, XLA leaves out of the program. So every layer is cut as it is.

Legend: B replicas (1), T rows of the flat batch, N query heads, K kv heads, H head dim of keys, V of values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.config import ConfigError
from jaxllm.models.attention_context import AttentionParams, LayerIndex


class AttentionCall(NamedTuple):
    """Arguments of ``AttentionContext.attend``: what the devices of attention get of a layer.

    Attributes:
        q: queries.
        k: keys; latents in multi-head latent attention.
        v: values; None where they are a part of the keys.
        sinks: attention sinks; None where the layer has none.
        params: static parameters.
    """

    q: Float[Array, "B T N H"]
    k: Float[Array, "B T K H"]
    v: Float[Array, "B T K V"] | None
    sinks: Float[Array, " N"] | None
    params: AttentionParams

    @property
    def arrays(self) -> tuple[Any, ...]:
        """Arrays that travel: all but the static parameters."""
        return self.q, self.k, self.v, self.sinks

    @property
    def value_dim(self) -> int:
        """Head dim of the result."""
        width = self.params.latent if self.v is None else self.v.shape[3]
        assert width is not None
        return width


@dataclass
class CallRecorder:
    """Attention context that records what it is called with; its results are zeros that nothing may depend on.

    Multi-head latent attention gives it absorbed queries and latents, as to a KV cache.

    Attributes:
        calls: the calls so far.
    """

    calls: list[AttentionCall] = field(default_factory=list)
    is_kv_cache: ClassVar[bool] = True

    def attend(
        self,
        layer: LayerIndex,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K V"] | None,
        positions: Int[Array, "B T"],
        params: AttentionParams,
        sinks: Float[Array, " N"] | None = None,
    ) -> tuple[Float[Array, "B T N V"], CallRecorder]:
        """Records the call."""
        self.calls.append(AttentionCall(q, k, v, sinks, params))
        zeros = jnp.zeros_like(q[..., :1])
        return jnp.concatenate([zeros] * self.calls[-1].value_dim, axis=-1), self


@dataclass
class AttendedResult:
    """Attention context whose result is known.

    Attributes:
        value: the result.
    """

    value: Float[Array, "B T N V"]
    is_kv_cache: ClassVar[bool] = True

    def attend(
        self,
        layer: LayerIndex,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K V"] | None,
        positions: Int[Array, "B T"],
        params: AttentionParams,
        sinks: Float[Array, " N"] | None = None,
    ) -> tuple[Float[Array, "B T N V"], AttendedResult]:
        """The known result."""
        return self.value, self


def attention_call(block: Any, stream: Any, positions: Int[Array, "B T"], layer: LayerIndex) -> AttentionCall:
    """Call of a block's attention on a residual stream.

    Args:
        block: ``Functional.block``.

    Raises:
        ConfigError: the layer calls attention another number of times than once, so that one cut does not do.
    """
    recorder = CallRecorder()
    block(stream, positions, layer, recorder)
    if len(recorder.calls) != 1:
        raise ConfigError(
            f"an attention pool serves layers that call attention once, and {type(block.attention).__name__} calls it "
            f"{len(recorder.calls)} times: serve without pools, or over a mesh."
        )
    return recorder.calls[0]


def after_attention(
    block: Any, stream: Any, positions: Int[Array, "B T"], layer: LayerIndex, attended: Float[Array, "B T N V"]
) -> Any:
    """Residual stream behind a block whose attention gave ``attended``; arguments as ``attention_call``."""
    return block(stream, positions, layer, AttendedResult(attended))[0]
