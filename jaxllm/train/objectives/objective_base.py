"""Training objectives: ``(model, params, batch) -> LossSums``, and next-token cross-entropy, the first of them.

    Objective        any loss of parameters and a batch; it runs its own forward passes
    HeadObjective    a loss of the final hidden states of one forward pass, which the step runs: with gradient
                     accumulation, layer by layer, and in a pipeline if the loss is a sum over single tokens

Padding and masked tokens have targets below 0, the loss mask. The z-loss (arXiv:2204.02311, section 5) is part of the
cross-entropy; load-balancing losses come from ``routing_losses``.

Legend: B batch, S sequence, D embed, V vocab.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import sharding
from jaxllm.models import Functional, Segments
from jaxllm.train.step.routing_losses import RoutingSums
from pallas_kernels.cross_entropy import linear_cross_entropy, linear_token_logprobs

HIDDEN = ("batch", "seq", None)
TOKENS = ("batch", "seq")


class LossSums(NamedTuple):
    """Loss terms summed over a batch's target tokens, in nats and at least float32; divide by ``count`` for means."""

    loss: Float[Array, ""]  # the differentiated sum: the objective's loss and routing losses
    nll: Float[Array, ""]  # negative log-likelihood of the targets
    z: Float[Array, ""]  # squared log-partition function (logsumexp); zero for objectives without z-loss
    count: Float[Array, ""]  # target tokens
    routing: RoutingSums | None = None  # models with experts, where requested
    items: Float[Array, ""] | None = None  # what the loss is a mean over (``Objective.items``); None: target tokens
    metrics: dict[str, Float[Array, ""]] | None = None  # sums over the items, by name; None: no further metrics

    @property
    def total(self) -> Float[Array, ""]:
        """Number of items that the loss is a mean over."""
        return self.count if self.items is None else self.items

    def means(self) -> dict[str, Array]:
        """Mean loss per item, and further metrics of the objective per item."""
        total = jnp.maximum(self.total, 1)
        return {"loss": self.loss / total} | {name: x / total for name, x in (self.metrics or {}).items()}


class Objective(abc.ABC):
    """Training objective. The gradients of a step are those of ``loss / total`` over the whole batch.

    Implementations are frozen dataclasses; their fields are the options that a run can set.

    Attributes:
        required: optional fields of the batch that the objective reads, such as ``advantages``.
        optional: those that it reads where the batch has them.
        metrics: names of its further metrics, the keys of ``LossSums.metrics``.
        contents: values of ``data.content`` that have its batches.
        value_head: whether the run's parameters have a value head (``jaxllm.models.value_head``).
    """

    contents: ClassVar[tuple[str, ...]] = ("text", "chat")
    required: ClassVar[tuple[str, ...]] = ()
    optional: ClassVar[tuple[str, ...]] = ()
    metrics: ClassVar[tuple[str, ...]] = ()
    value_head: ClassVar[bool] = False

    @abc.abstractmethod
    def __call__(self, model: Functional, params: Any, batch: Any) -> LossSums:
        """Loss sums of a batch (``jaxllm.data.Batch``, [B S] each), or of a micro-batch of it."""

    def items(self, batch: Any) -> Array | None:
        """Number of items in a batch or micro-batch that the loss is a mean over; None: its target tokens."""
        return None

    def total(self, batch: Any) -> Array:
        """Number of items or target tokens in a batch."""
        return jnp.sum(batch.targets >= 0) if (items := self.items(batch)) is None else items

    def no_sums(self, batch: Any, zero: Array) -> LossSums:
        """Loss sums of nothing, with the members that those of ``batch`` have."""
        items = None if self.items(batch) is None else zero
        return LossSums(zero, zero, zero, zero, None, items, dict.fromkeys(self.metrics, zero) or None)


class HeadObjective(Objective):
    """Objective of the final hidden states.

    Attributes:
        per_token: whether the sums are over single tokens, each of which depends on its own place in the batch alone.
            Then a pipeline can take it, where a device sees only its own rows of a micro-batch.
    """

    per_token: ClassVar[bool] = True

    @abc.abstractmethod
    def sums(self, model: Functional, hidden: Float[Array, "B S D"], head: Float[Array, "V D"], batch: Any) -> LossSums:
        """Loss sums from the final hidden states and the output matrix; sharding rules are in force.

        ``sharded_token_logprobs`` gives log-probabilities and entropies of the targets without storing the logits.
        """

    def from_hidden(self, model: Functional, params: Any, hidden: Float[Array, "B S D"], batch: Any) -> LossSums:
        """Loss sums from hidden states before the final norm.

        Args:
            params: the parameters, or those of ``embedding`` and ``head`` alone.
        """
        hidden, head = model.unembed(params, hidden)
        with sharding.use_rules(model.rules):
            return self.sums(model, hidden, head, batch)

    def __call__(self, model: Functional, params: Any, batch: Any) -> LossSums:
        """Loss sums of a batch, after a forward pass."""
        hidden, _ = model.forward(params, batch.tokens, batch.positions, Segments(batch.segment_ids))
        return self.from_hidden(model, params, hidden, batch)


@dataclass(frozen=True)
class CrossEntropyObjective(HeadObjective):
    """Next-token cross-entropy, with token weights where the batch has them.

    Attributes:
        z_loss: weight of the z-loss, the squared log-partition function.
    """

    optional = ("weights",)

    z_loss: float = 0.0

    def sums(self, model: Functional, hidden: Float[Array, "B S D"], head: Float[Array, "V D"], batch: Any) -> LossSums:
        """Cross-entropy fused with the vocabulary projection."""
        return sharded_loss_sums(hidden, head, batch.targets, self.z_loss, model.config.logit_softcap, batch.weights)


def sharded_loss_sums(
    hidden: Float[Array, "B S D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "B S"],
    z_loss: float,
    softcap: float | None,
    weights: Float[Array, "B S"] | None = None,
) -> LossSums:
    """Cross-entropy of hidden states, fused with the vocabulary projection and summed over all devices.

    Args:
        hidden: final hidden states.
        head: output matrix, possibly sharded over the vocabulary.
        targets: token ids; below 0: masked.
        z_loss: weight of the z-loss.
        softcap: of the logits; None: none.
        weights: factor of each token in all sums but the count; None: one.
    """
    token_axes = sharding.axis_names(*TOKENS)
    vocab_axes = sharding.axis_names("act_vocab")

    def local(hidden: Array, head: Array, targets: Array, weights: Array | None) -> tuple[Array, ...]:
        flat = targets.reshape(-1)
        counted = (flat >= 0).astype(jnp.promote_types(hidden.dtype, jnp.float32))
        loss, stats = linear_cross_entropy(
            hidden.reshape(-1, hidden.shape[-1]),
            head,
            flat,
            counted if weights is None else counted * weights.reshape(-1).astype(counted.dtype),
            z_loss=z_loss,
            softcap=softcap,
            vocab_axis=vocab_axes or None,
        )
        sums = (loss, stats.nll_sum, stats.z_sum, counted.sum())
        return tuple(jax.lax.psum(x, token_axes) for x in sums) if token_axes else sums

    sums = sharding.shard_map(local, (HIDDEN, ("act_vocab", None), TOKENS, TOKENS), ((), (), (), ()))
    with jax.named_scope("loss"):
        return LossSums(*sums(sharding.whole_rows(hidden, over="act_vocab"), head, targets, weights))


def sharded_token_logprobs(
    hidden: Float[Array, "B S D"], head: Float[Array, "V D"], targets: Int[Array, "B S"], softcap: float | None
) -> tuple[Float[Array, "B S"], Float[Array, "B S"]]:
    """Log-probability of each target and entropy of its distribution, both zero where the target is masked.

    Fused with the vocabulary projection, see ``linear_token_logprobs``; sharded as the tokens are.

    Args:
        hidden: final hidden states.
        head: output matrix, possibly sharded over the vocabulary.
        targets: token ids; below 0: masked.
        softcap: of the logits; None: none.
    """
    vocab_axes = sharding.axis_names("act_vocab")

    def local(hidden: Array, head: Array, targets: Array) -> tuple[Array, ...]:
        flat = hidden.reshape(-1, hidden.shape[-1])
        found = linear_token_logprobs(flat, head, targets.reshape(-1), softcap, vocab_axes or None)
        return tuple(jnp.where(targets >= 0, x.reshape(targets.shape), 0.0) for x in found)

    logprobs = sharding.shard_map(local, (HIDDEN, ("act_vocab", None), TOKENS), (TOKENS, TOKENS))
    with jax.named_scope("loss"):
        return logprobs(sharding.whole_rows(hidden, over="act_vocab"), head, targets)
