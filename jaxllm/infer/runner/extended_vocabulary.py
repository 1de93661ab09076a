"""Extended vocabulary: a token embedding with rows for further tokens, which a model reads and never writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import sharding
from jaxllm.models.linear import gather, vocabulary_logits
from sharding import LogicalAxes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExtendedVocabulary:
    """Token embedding whose tokens from V on have rows of their own; a ``jaxllm.models.linear.VocabularyWeight``.

    Attributes:
        base: the model's embedding [V, D], of any kind; it is not copied. Where it is the output matrix too, logits
            are those of its tokens alone.
        extra: Float[Array, "M D"], rows of the tokens V to V + M - 1.
    """

    base: Any
    extra: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the model's embedding."""
        return self.base.shape

    def gather(self, dtype: jnp.dtype, axes: LogicalAxes, unreduced_grad: bool) -> ExtendedVocabulary:
        """The embedding for use, see ``jaxllm.models.linear.gather``."""
        return ExtendedVocabulary(gather(self.base, dtype, axes, unreduced_grad), self.extra.astype(dtype))

    def dense(self, dtype: jnp.dtype) -> Float[Array, "V D"]:
        """The model's embedding as an array."""
        return self.base.astype(dtype) if isinstance(self.base, jax.Array) else self.base.dense(dtype)

    def lookup(self, ids: Int[Array, "B S"], dtype: jnp.dtype, out: LogicalAxes) -> Float[Array, "B S D"]:
        """Rows of tokens of either kind."""
        known, base = self.shape[0], self.base
        own = jnp.minimum(ids, known - 1)
        rows = sharding.take(base, own, out=out) if isinstance(base, jax.Array) else base.lookup(own, dtype, out)
        extra = sharding.take(self.extra, jnp.maximum(ids - known, 0), out=out)
        return jnp.where((ids >= known)[..., None], extra, rows)

    def logits(self, x: Float[Array, "B S D"], out: LogicalAxes) -> Float[Array, "B S V"]:
        """Matmul of hidden states and every row of the model's embedding."""
        return vocabulary_logits(x, self.base, out)
