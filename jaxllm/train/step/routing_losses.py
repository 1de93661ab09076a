"""Routing losses of mixture-of-experts models: load-balancing loss, router z-loss, balance biases and load metrics.

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

import sharding
from jaxllm.models import DecoderConfig, MoeConfig
from jaxllm.models.attention_context import AttentionParams, LayerIndex, RowSplitContext
from jaxllm.models.moe.router import Routing


@dataclass(frozen=True)
class RoutingConfig:
    """Losses and biases that keep the load of experts even.

    Attributes:
        balance_loss: weight of the load-balancing loss ``E * sum over experts of (share of tokens sent there) * (mean
            share of the router)``, which is one when loads are even (arXiv:2101.03961, section 2.2); mean over layers.
            It is computed per micro-batch, over the tokens of all devices: for a whole batch of several micro-batches,
            the shares would be known only after a forward pass of all. The more tokens, the less the loss hinders
            specialisation (arXiv:2501.11873): prefer accumulate = 1, or ``bias_rate``, which uses loads of the whole
            batch.
        z_loss: weight of the router z-loss, the squared logsumexp of router logits, mean over tokens and layers
            (ST-MoE, arXiv:2202.08906).
        bias_rate: step size of balance biases: after each training step a router's bias rises by this for experts
            below the even share and falls for those above (arXiv:2408.15664). For routers with ``balance_bias``.
        absent: share of the experts that are away at a time (``jaxllm.train.step.absent_experts``), below 1; 0: none.
        absent_steps: steps of an absence; then others are away.
        log_loads: log the load of every expert of every layer as ``expert_load``.
    """

    balance_loss: float = 0.0
    z_loss: float = 0.0
    bias_rate: float = 0.0
    absent: float = 0.0
    absent_steps: int = 100
    log_loads: bool = False

    def __post_init__(self) -> None:
        for name in ("balance_loss", "z_loss", "bias_rate"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"routing: {name} = {getattr(self, name)}; give 0 (none) or a positive number.")
        if not 0 <= self.absent < 1:
            raise ValueError(f"routing: absent = {self.absent}; give 0 (none) or a share of the experts below 1.")
        if self.absent_steps < 1:
            raise ValueError(f"routing: absent_steps = {self.absent_steps}; give 1 or more steps.")

    def absent_of(self, experts: int) -> int:
        """Number of a layer's experts that are away at a time."""
        return round(self.absent * experts)

    def check(self, model: DecoderConfig, *, adapter_experts: bool = False) -> None:
        """Checks that the model has the experts and balance biases that these settings act on.

        Args:
            model: without adapters.
            adapter_experts: whether an adapter gives it experts.

        Raises:
            ValueError: it has not.
        """
        mixtures = list(model.mixtures.values())
        if self.absent:
            self._check_absent(mixtures)
        for name in ("balance_loss", "z_loss", "bias_rate", "log_loads"):
            if getattr(self, name) and not (mixtures or adapter_experts):
                raise ValueError(
                    f"routing: {name} = {getattr(self, name)}, but the model has no experts; leave it out."
                )
        if self.bias_rate and not (mixtures and all(moe.router.balance_bias for moe in mixtures)):
            raise ValueError(
                f"routing: bias_rate = {self.bias_rate}, but a router has no balance bias; set balance_bias in the "
                "model's RouterConfig, or give 0."
            )

    def _check_absent(self, mixtures: list[MoeConfig]) -> None:
        if len({mixture.experts for mixture in mixtures}) != 1:
            raise ValueError(
                f"routing: absent = {self.absent} needs a model whose layers with experts have equally many; leave it "
                "out."
            )
        for mixture in mixtures:
            left = mixture.experts - self.absent_of(mixture.experts)
            if left < mixture.top_k or mixture.router.groups > 1:
                raise ValueError(
                    f"routing: absent = {self.absent} leaves {left} of {mixture.experts} experts, and a token goes "
                    f"to {mixture.top_k} in {mixture.router.groups} groups; leave at least that many, without groups."
                )
        if self.bias_rate:
            raise ValueError(
                f"routing: absent = {self.absent} with bias_rate = {self.bias_rate}: the loads of absent experts would "
                "raise their biases; set one of them to 0."
            )


class RoutingSums(NamedTuple):
    """Routing statistics summed over a batch; losses are weighted by target tokens, as the cross-entropy is."""

    counts: Float[Array, "L E"]  # tokens routed to each expert; zeros for experts and layers that do not exist
    dropped: Float[Array, ""]  # how many of those were dropped, for lack of capacity
    balance: Float[Array, ""]  # load-balancing loss without its weight
    z: Float[Array, ""]  # router z-loss without its weight


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["segments", "counts", "dropped", "balance", "z"],
    meta_fields=["over"],
)
@dataclass(frozen=True)
class RoutingAccumulator:
    """Attention context of training that also accumulates routing statistics of every layer, without padding tokens.

    Attributes:
        segments: the attention context of packed sequences that attention is delegated to.
        counts, dropped: as in ``RoutingSums``.
        balance, z: losses summed over layers.
        over: manual mesh axes that tokens are split over; all statistics are then partial sums of one device.
    """

    segments: Any
    counts: Float[Array, "L E"]
    dropped: Float[Array, ""]
    balance: Float[Array, ""]
    z: Float[Array, ""]
    over: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: DecoderConfig, segments: Any) -> RoutingAccumulator | None:
        """Empty accumulator for a model; None for a model without experts."""
        most = max(config.routed_layers.values(), default=0)
        if most == 0:
            return None
        zero = jnp.zeros((), jnp.promote_types(config.dtype, jnp.float32))
        return cls(segments, jnp.zeros((config.layers, most), zero.dtype), zero, zero, zero)

    def split_rows(self) -> RoutingAccumulator:
        """Accumulator whose tokens are split over devices as the sharding rules in force split them."""
        own = self.segments
        return replace(self, segments=own.split_rows()) if isinstance(own, RowSplitContext) else self

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
        """Attention within segments, as ``Segments.attend``."""
        return self.segments.attend(layer, q, k, v, positions, params, sinks)[0], self

    def record_routing(self, layer: LayerIndex, routing: Routing) -> RoutingAccumulator:
        """Adds the routing statistics of one layer."""
        dtype, experts = self.counts.dtype, routing.shares.shape[-1]
        # Split by rows as the layer's tokens are, which may be otherwise than those of the layers before.
        ids = self.segments.segment_ids
        ids = None if ids is None else sharding.constrain(ids, "batch", "seq")
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
        """Sum over all devices, of values that need no gradient."""
        return jax.lax.psum(x, self.over) if self.over else x

    def sums(self, config: DecoderConfig, count: Float[Array, ""]) -> RoutingSums:
        """Statistics of a batch with ``count`` target tokens; losses are means over the layers that have experts."""
        layers = len(config.routed_layers)
        return RoutingSums(self.counts, self.dropped, *(count * x / layers for x in (self.balance, self.z)))


def routing_metrics(config: DecoderConfig, sums: RoutingSums, count: Float[Array, ""]) -> dict[str, Array]:
    """Routing metrics for the log.

    A load of one is an even share. ``expert_load`` has the load of each expert of each layer with experts (zeros
    behind the last expert of a layer that has fewer), ``expert_load_max`` and ``expert_load_min`` the extremes over
    all layers, ``expert_dropped`` the share of dropped assignments, ``balance_loss`` and ``router_z`` the unweighted
    losses.

    Args:
        sums: of the step.
        count: target tokens of the step.
    """
    layers = np.array(list(config.routed_layers))
    experts = np.array(list(config.routed_layers.values()))
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
    """Function ``(params, sums) -> params`` that moves the routers' balance biases towards even loads.

    Args:
        config: the architecture.
        rate: step size (``RoutingConfig.bias_rate``).
    """

    def step_bias(bias: Float[Array, "R E"], counts: Float[Array, "R E2"]) -> Float[Array, "R E"]:
        counts = counts[:, : bias.shape[1]]
        mean = jnp.mean(counts, axis=1, keepdims=True)
        return bias + (rate * jnp.sign(mean - counts)).astype(bias.dtype)

    def update(params: Any, sums: RoutingSums) -> Any:
        segments, first = dict(params["segments"]), 0
        for s, (group, repeats) in enumerate(config.segments):
            segments[str(s)] = blocks = dict(segments[str(s)])
            for b, block in enumerate(group):
                if block.mlp.mixture is not None and block.mlp.mixture.router.balance_bias:
                    rows = np.arange(repeats) * len(group) + first + b
                    mlp = blocks[str(b)]["mlp"]
                    biases = {"balance_bias": step_bias(mlp["balance_bias"], sums.counts[rows])}
                    blocks[str(b)] = {**blocks[str(b)], "mlp": {**mlp, **biases}}
            first += len(group) * repeats
        return {**params, "segments": segments}

    return update
