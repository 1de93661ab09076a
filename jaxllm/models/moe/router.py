"""Router of a mixture of experts: top-k choice of experts from each token's scores, and their combine weights.

All values are in at least float32. Load balancing: by the ``balance_bias`` here, or by the load-balancing loss in
``jaxllm.train.step.routing_losses``.

Legend: B batch, S sequence, E experts, A experts per token (top-k), G groups of experts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

import sharding

TOP_OF_GROUP = {"best": 1, "best two": 2}


class Routing(NamedTuple):
    """Routing of a batch of tokens."""

    logits: Float[Array, "B S E"]  # router logits
    shares: Float[Array, "B S E"]  # router probabilities: scores that sum to one over all experts
    experts: Int[Array, "B S A"]  # chosen experts, best first
    weights: Float[Array, "B S A"]  # combine weights of the chosen experts' outputs
    dropped: Float[Array, ""]  # number of the B x S x A rows that were dropped for lack of capacity


@dataclass(frozen=True)
class RouterConfig:
    """Choice of experts and their combine weights.

    Attributes:
        scoring: score of an expert: softmax over all experts (arXiv:1701.06538), or its own sigmoid (DeepSeek-V3,
            arXiv:2412.19437); or 1 where its logit is above 0 and 0 elsewhere ("step"), which no gradient reaches.
        normalize: combine weights are normalised to sum to one (Mixtral, arXiv:2401.04088), instead of being the
            scores (Switch, arXiv:2101.03961).
        scale: factor on the combine weights, after normalisation.
        groups: number of groups of experts; a token chooses ``top_groups`` of them first (arXiv:2405.04434, section
            2.2.2).
        top_groups: groups per token.
        group_score: score of a group: that of its best expert (DeepSeek-V2), or the sum of its best two (DeepSeek-V3).
        bias: whether the router's logits have a bias (gpt-oss).
        input: what the router reads: the input of its own layer ("own"), or that of the mixture before it ("previous"),
            so that a layer's experts are known, and can be on their way to the device, while the layer before computes
            (Pre-gated MoE, arXiv:2308.12066). The first mixture of a model reads its own.
        balance_bias: a bias per expert that is added to scores for the top-k choice alone. No gradient reaches it:
            training updates it by load (auxiliary-loss-free load balancing, arXiv:2408.15664).
    """

    scoring: Literal["softmax", "sigmoid", "step"] = "softmax"
    normalize: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["best", "best two"] = "best"
    bias: bool = False
    input: Literal["own", "previous"] = "own"
    balance_bias: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.top_groups <= self.groups:
            raise ValueError(
                f"router: top_groups = {self.top_groups} of groups = {self.groups}; legal: 1 to {self.groups}."
            )
        if self.scoring == "step" and (self.normalize or self.balance_bias or self.groups > 1):
            raise ValueError(
                "router: scoring = 'step' takes an expert or not, with weight 1: give normalize = False, no "
                "balance_bias and one group."
            )
        if not self.scale > 0:
            raise ValueError(f"router: scale = {self.scale}; give a positive number.")

    def check(self, experts: int, top_k: int) -> None:
        """Checks that ``top_k`` of ``experts`` can be chosen.

        Raises:
            ValueError: they cannot; says which numbers are legal.
        """
        if top_k > experts:
            raise ValueError(f"mixture of experts: top_k = {top_k} of experts = {experts}; choose {experts} or fewer.")
        if experts % self.groups:
            legal = [n for n in range(1, min(experts, 256) + 1) if experts % n == 0]
            raise ValueError(f"router: groups = {self.groups} does not divide experts = {experts}; legal: {legal}.")
        each = experts // self.groups
        if self.groups > 1 and each < TOP_OF_GROUP[self.group_score]:
            raise ValueError(f"router: a group of {each} has no {self.group_score!r} experts; choose fewer groups.")
        if top_k > self.top_groups * each:
            raise ValueError(
                f"router: top_k = {top_k}, but top_groups = {self.top_groups} of {each} experts hold "
                f"{self.top_groups * each}; choose {self.top_groups * each} or fewer."
            )


_available: ContextVar[Array | None] = ContextVar("available_experts", default=None)


@contextlib.contextmanager
def only_experts(available: Bool[Array, " E"]) -> Iterator[None]:
    """Context manager: routers that are traced in the body choose among available experts alone.

    Args:
        available: the same for all layers.
    """
    token = _available.set(available)
    try:
        yield
    finally:
        _available.reset(token)


def route(
    config: RouterConfig, top_k: int, logits: Float[Array, "B S E"], balance_bias: Float[Array, " E"] | None
) -> Routing:
    """Routing of tokens by their router logits: top-k experts and combine weights; ``dropped`` is zero.

    Absent experts (``only_experts``) have logits of minus infinity: scores are normalised over the others.
    """
    if (available := _available.get()) is not None:
        logits = jnp.where(available, logits, -jnp.inf)
    if config.scoring == "softmax":
        scores = shares = jax.nn.softmax(logits, axis=-1)
    elif config.scoring == "step":
        scores = (logits > 0).astype(logits.dtype)
        shares = scores / jnp.maximum(jnp.sum(scores, axis=-1, keepdims=True), 1)
    else:
        scores = jax.nn.sigmoid(logits)
        shares = scores / jnp.sum(scores, axis=-1, keepdims=True)
    worth = scores if balance_bias is None else scores + balance_bias
    if available is not None:
        worth = jnp.where(available, worth, -jnp.inf)
    if config.groups > 1:
        worth = _in_best_groups(config, worth)
    if worth is scores:
        weights, experts = _top_k(scores, top_k)
    else:
        _, experts = _top_k(jax.lax.stop_gradient(worth), top_k)
        weights = jnp.take_along_axis(scores, experts, axis=-1)
    if config.normalize:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    if config.scale != 1.0:
        weights = weights * config.scale
    return Routing(logits, shares, experts, weights, jnp.zeros((), logits.dtype))


def _in_best_groups(config: RouterConfig, worth: Float[Array, "B S E"]) -> Float[Array, "B S E"]:
    """Scores with minus infinity for experts of groups that a token does not choose."""
    grouped = worth.reshape(*worth.shape[:-1], config.groups, -1)
    best, _ = _top_k(grouped, TOP_OF_GROUP[config.group_score])
    _, chosen = _top_k(jnp.sum(best, axis=-1), config.top_groups)
    kept = jnp.any(jax.nn.one_hot(chosen, config.groups, dtype=bool), axis=-2)
    return jnp.where(kept[..., None], grouped, -jnp.inf).reshape(worth.shape)


def _top_k(x: Float[Array, "*tokens N"], k: int) -> tuple[Float[Array, "*tokens K"], Int[Array, "*tokens K"]]:
    """``jax.lax.top_k`` over the last dimension, of each device's tokens.

    Where both B and S are split, the GPU compiler would gather the scores of the whole batch on every device.
    """
    return sharding.by_shard(lambda part: tuple(jax.lax.top_k(part, k)), x)
