"""Routers of mixtures of experts: from each token's scores of all experts to the few that it is sent to.

Everything is in at least float32, as the scores are.

Legend: B batch, S sequence, E experts, A experts a token is sent to, G groups of experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

TOP_OF_GROUP = {"best": 1, "best two": 2}


class Routing(NamedTuple):
    """What a router made of its tokens; ``experts`` likeliest first."""

    logits: Float[Array, "B S E"]
    shares: Float[Array, "B S E"]  # its scores, made to sum to one over all experts
    experts: Int[Array, "B S A"]
    weights: Float[Array, "B S A"]  # of the chosen experts' results
    dropped: Float[Array, ""]  # how many of the B x S x A were sent nowhere, for lack of room


@dataclass(frozen=True)
class RouterConfig:
    """How a token's experts are chosen, and how they are weighed.

    Attributes:
        scoring: the score of an expert: its share of a softmax over all (arXiv:1701.06538), or a sigmoid of its own
            (DeepSeek-V3, arXiv:2412.19437).
        normalize: the chosen experts' weights are made to sum to one (Mixtral, arXiv:2401.04088), instead of being
            their scores (Switch, arXiv:2101.03961).
        scale: what weights are multiplied by, after that.
        groups: experts come in this many groups, of which a token chooses ``top_groups`` first (arXiv:2405.04434,
            section 2.2.2).
        group_score: of a group: its best expert's (DeepSeek-V2), or the sum of its best two (DeepSeek-V3).
        bias: scores are added to as the logits are (gpt-oss).
        balance_bias: a number for each expert, added to scores when choosing and at no other time. No gradient reaches
            it: training moves it by load (arXiv:2408.15664).
    """

    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["best", "best two"] = "best"
    bias: bool = False
    balance_bias: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.top_groups <= self.groups:
            raise ValueError(
                f"router: top_groups = {self.top_groups} of groups = {self.groups}; legal: 1 to {self.groups}."
            )
        if not self.scale > 0:
            raise ValueError(f"router: scale = {self.scale}; give a positive number.")

    def check(self, experts: int, top_k: int) -> None:
        """Raises ValueError where so many experts cannot be chosen from in this way."""
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


def route(
    config: RouterConfig, top_k: int, logits: Float[Array, "B S E"], balance_bias: Float[Array, " E"] | None
) -> Routing:
    """The experts of each token."""
    if config.scoring == "softmax":
        scores = shares = jax.nn.softmax(logits, axis=-1)
    else:
        scores = jax.nn.sigmoid(logits)
        shares = scores / jnp.sum(scores, axis=-1, keepdims=True)
    worth = scores if balance_bias is None else scores + balance_bias
    if config.groups > 1:
        worth = _in_best_groups(config, worth)
    if worth is scores:
        weights, experts = jax.lax.top_k(scores, top_k)
    else:
        _, experts = jax.lax.top_k(jax.lax.stop_gradient(worth), top_k)
        weights = jnp.take_along_axis(scores, experts, axis=-1)
    if config.normalize:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    if config.scale != 1.0:
        weights = weights * config.scale
    return Routing(logits, shares, experts, weights, jnp.zeros((), logits.dtype))


def _in_best_groups(config: RouterConfig, worth: Float[Array, "B S E"]) -> Float[Array, "B S E"]:
    """Minus infinity for experts of groups that a token does not choose."""
    grouped = worth.reshape(*worth.shape[:-1], config.groups, -1)
    best, _ = jax.lax.top_k(grouped, TOP_OF_GROUP[config.group_score])
    _, chosen = jax.lax.top_k(jnp.sum(best, axis=-1), config.top_groups)
    kept = jnp.any(jax.nn.one_hot(chosen, config.groups, dtype=bool), axis=-2)
    return jnp.where(kept[..., None], grouped, -jnp.inf).reshape(worth.shape)
