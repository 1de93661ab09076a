"""Keeping the experts of a mixture in use: what is added to the loss, what is moved by load, and what is counted.

Legend: B batch, S sequence, L layers, E experts of the layer that has most, A experts a token is sent to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxllm.models import DecoderConfig, MoeConfig, Segments
from jaxllm.models.attention_context import AttentionParams, LayerIndex
from jaxllm.models.moe.router import Routing


@dataclass(frozen=True)
class RoutingConfig:
    """How training keeps experts in use.

    Attributes:
        balance_loss: weight of ``E * sum over experts of (share of tokens sent there) * (mean share of the router)``,
            one when all are even (arXiv:2101.03961, section 2.2), mean over layers. Of a micro-batch, the tokens of all
            devices together: over a whole batch of several, shares of tokens would be known only after a forward pass
            of them all. The more tokens, the less the loss hinders experts (arXiv:2501.11873): prefer accumulate = 1,
            or ``bias_rate``, whose loads are of the whole batch.
        z_loss: weight of the routers' squared logsumexp, mean over tokens and layers (ST-MoE, arXiv:2202.08906).
        bias_rate: after each step a router's balance bias moves by this, up where an expert got less than its even
            share and down where it got more (arXiv:2408.15664). For routers that have one (``balance_bias``).
        log_loads: every expert's load, layer by layer, goes to the log as ``expert_load``.
    """

    balance_loss: float = 0.0
    z_loss: float = 0.0
    bias_rate: float = 0.0
    log_loads: bool = False

    def __post_init__(self) -> None:
        for name in ("balance_loss", "z_loss", "bias_rate"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"routing: {name} = {getattr(self, name)}; give 0 (none) or a positive number.")

    def check(self, model: DecoderConfig) -> None:
        """Raises ValueError where the model has nothing that this could act on."""
        mixtures = [block.mlp for block in model.blocks if isinstance(block.mlp, MoeConfig)]
        for name in ("balance_loss", "z_loss", "bias_rate", "log_loads"):
            if getattr(self, name) and not mixtures:
                raise ValueError(
                    f"routing: {name} = {getattr(self, name)}, but the model has no experts; leave it out."
                )
        if self.bias_rate and not all(moe.router.balance_bias for moe in mixtures):
            raise ValueError(
                f"routing: bias_rate = {self.bias_rate}, but a router has no bias to move; set balance_bias in the "
                "model's RouterConfig, or give 0."
            )


class RoutingSums(NamedTuple):
    """Sums over a batch; what is weighted is weighted by its target tokens, as the loss is."""

    counts: Float[Array, "L E"]  # tokens sent to each expert; zeros where there is none
    dropped: Float[Array, ""]  # how many of those were sent nowhere, for lack of room
    balance: Float[Array, ""]  # the balance loss without its weight
    z: Float[Array, ""]  # the z-loss without its weight


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["segments", "counts", "dropped", "balance", "z"],
    meta_fields=["over"],
)
@dataclass(frozen=True)
class RoutingAccumulator:
    """A context of training that hears every router. Padding is not counted.

    Attributes:
        segments: what attends.
        counts, dropped: as in ``RoutingSums``.
        balance, z: sums over layers.
        over: manual mesh axes that tokens are split over; then all of these are a device's summands.
    """

    segments: Segments
    counts: Float[Array, "L E"]
    dropped: Float[Array, ""]
    balance: Float[Array, ""]
    z: Float[Array, ""]
    over: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: DecoderConfig, segments: Segments) -> RoutingAccumulator | None:
        """An empty one; None for a model without experts."""
        most = max((block.mlp.experts for block in config.blocks if isinstance(block.mlp, MoeConfig)), default=0)
        if most == 0:
            return None
        zero = jnp.zeros((), jnp.promote_types(config.dtype, jnp.float32))
        return cls(segments, jnp.zeros((config.layers, most), zero.dtype), zero, zero, zero)

    def attend(
        self,
        layer: LayerIndex,
        q: Float[Array, "B S N H"],
        k: Float[Array, "B S K H"],
        v: Float[Array, "B S K V"],
        positions: Int[Array, "B S"],
        params: AttentionParams,
        sinks: Float[Array, " N"] | None = None,
    ) -> tuple[Float[Array, "B S N V"], RoutingAccumulator]:
        """As ``Segments``."""
        return self.segments.attend(layer, q, k, v, positions, params, sinks)[0], self

    def record_routing(self, layer: LayerIndex, routing: Routing) -> RoutingAccumulator:
        """Adds a layer's."""
        dtype, experts = self.counts.dtype, routing.shares.shape[-1]
        ids = self.segments.segment_ids
        real = jnp.ones(routing.experts.shape[:2], dtype) if ids is None else (ids > 0).astype(dtype)
        tokens = jnp.maximum(self._of_all(jnp.sum(real)), 1)
        chosen = jnp.sum(jax.nn.one_hot(routing.experts, experts, dtype=dtype), axis=2) * real[..., None]
        load = jnp.sum(chosen, axis=(0, 1))
        share = jnp.sum(routing.shares.astype(dtype) * real[..., None], axis=(0, 1)) / tokens
        even = self._of_all(load) / (tokens * routing.experts.shape[-1])
        z = jnp.square(jax.nn.logsumexp(routing.logits.astype(dtype), axis=-1))
        return replace(
            self,
            counts=self.counts.at[layer].add(jnp.pad(load, (0, self.counts.shape[1] - experts))),
            dropped=self.dropped + routing.dropped.astype(dtype),
            balance=self.balance + experts * jnp.sum(even * share),
            z=self.z + jnp.sum(z * real) / tokens,
        )

    def _of_all(self, x: Array) -> Array:
        """The sum over all devices of what has no gradient."""
        return jax.lax.psum(x, self.over) if self.over else x

    def sums(self, config: DecoderConfig, count: Float[Array, ""]) -> RoutingSums:
        """Of a batch with ``count`` target tokens."""
        layers = sum(isinstance(block.mlp, MoeConfig) for block in config.blocks)
        return RoutingSums(self.counts, self.dropped, *(count * x / layers for x in (self.balance, self.z)))


def routing_metrics(config: DecoderConfig, sums: RoutingSums, count: Float[Array, ""]) -> dict[str, Array]:
    """Figures for the log.

    Loads are one when all are even: of each expert of each layer that has some (``expert_load``, zeros behind a layer's
    last where another has more), of the fullest and of the emptiest of all.
    """
    layers = np.array([i for i, block in enumerate(config.blocks) if isinstance(block.mlp, MoeConfig)])
    experts = np.array([config.blocks[i].mlp.experts for i in layers])  # type: ignore[union-attr]
    counts = sums.counts[layers]
    load = counts * experts[:, None] / jnp.maximum(jnp.sum(counts, axis=1, keepdims=True), 1)
    there = jnp.arange(counts.shape[1]) < experts[:, None]
    return {
        "expert_load": load,
        "expert_load_max": jnp.max(load),
        "expert_load_min": jnp.min(jnp.where(there, load, jnp.inf)),
        "expert_dropped": sums.dropped / jnp.maximum(jnp.sum(counts), 1),
        "balance_loss": sums.balance / count,
        "router_z": sums.z / count,
    }


def update_balance_biases(config: DecoderConfig, rate: float) -> Callable[[Any, RoutingSums], Any]:
    """``(params, sums) -> params`` whose routers' balance biases moved towards even loads."""

    def moved(bias: Float[Array, "R E"], counts: Float[Array, "R E2"]) -> Float[Array, "R E"]:
        counts = counts[:, : bias.shape[1]]
        mean = jnp.mean(counts, axis=1, keepdims=True)
        return bias + (rate * jnp.sign(mean - counts)).astype(bias.dtype)

    def move(params: Any, sums: RoutingSums) -> Any:
        segments, first = dict(params["segments"]), 0
        for s, (group, repeats) in enumerate(config.segments):
            segments[str(s)] = blocks = dict(segments[str(s)])
            for b, block in enumerate(group):
                if isinstance(block.mlp, MoeConfig) and block.mlp.router.balance_bias:
                    rows = np.arange(repeats) * len(group) + first + b
                    mlp = blocks[str(b)]["mlp"]
                    biases = {"balance_bias": moved(mlp["balance_bias"], sums.counts[rows])}
                    blocks[str(b)] = {**blocks[str(b)], "mlp": {**mlp, **biases}}
            first += len(group) * repeats
        return {**params, "segments": segments}

    return move
