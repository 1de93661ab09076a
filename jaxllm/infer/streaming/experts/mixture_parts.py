"""Parts of a mixture layer whose experts are in slots: up to the router's choice, experts in slots, and the sum.

Legend: B replicas (1), T rows of the flat batch, A experts of a token, E experts, N slots, D embed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import sharding
from jaxllm.infer.runner.page_programs import Pools
from jaxllm.infer.runner.paged_cache import PagedCache
from jaxllm.infer.runner.retention.eviction import RETAINING_HEADS
from jaxllm.infer.streaming.streamed_adapters import with_factors
from jaxllm.infer.streaming.streamed_step import StreamedStep, step_batch
from jaxllm.models.layers.residual_stream import GatedStream, LayerStream, plain_of


@dataclass(frozen=True, eq=False)
class MixtureParts:
    """Parts of block ``block`` of a repeat of ``segment``, as pure functions.

    Weights are those of the block; its experts' matrices are the N that are in slots.

    Attributes:
        step: the step.
        segment, block: see above.
        rest: shapes of the block's weights without experts.
    """

    step: StreamedStep
    segment: int
    block: int
    rest: Any

    def _module(self, weights: Any, layer: Any) -> Any:
        return self.step.step.model.block(self.segment, self.block, weights, layer, gated=True)

    def _adapted(self, params: Any, weights: Any, batch: tuple[Any, ...], layer: Any) -> Any:
        adapters, block = step_batch(batch).adapters, str(self.block)
        return with_factors(self.step.step.model, params, weights, adapters, layer, self.segment, block)

    def route(
        self,
        params: Any,
        weights: Any,
        pools: Pools,
        batch: tuple[Any, ...],
        hidden: LayerStream,
        layer: Int[Array, ""],
    ) -> tuple[Any, ...]:
        """Attention and routing.

        Returns:
            the pools, the residual stream, the layer's input, the chosen experts [B, T, A], their weights, and the
            router's shares [B, T, E].
        """
        with sharding.use_rules(self.step.step.model.rules):
            inputs = step_batch(batch)
            ctx = self.step.step.context(pools, inputs, params.get(RETAINING_HEADS))
            block = self._module(self._adapted(params, weights, batch, layer), layer)
            plain, h, ctx = block.attend(plain_of(hidden), inputs.positions, layer, ctx)
            assert isinstance(ctx, PagedCache)
            is_gated = isinstance(hidden, GatedStream)
            routing = block.mlp.routing(h, hidden.gate_input(h) if is_gated else None)
            x = GatedStream(plain, h, jnp.asarray(True)) if is_gated else plain
        return ctx.pools, x, h, routing.experts, routing.weights, routing.shares

    def experts(
        self,
        experts: Any,
        h: Float[Array, "B T D"],
        chosen: Int[Array, "B T A"],
        shares: Float[Array, "B T A"],
        table: Int[Array, " E"],
        total: Float[Array, "B T D"] | None,
    ) -> Float[Array, "B T D"]:
        """Adds the outputs of experts in slots to a sum.

        Args:
            experts: matrices of the experts in slots.
            table: slot of each expert that computes now; N for the others. Rows of weight 0 are not computed.
            total: the sum so far; None: nothing.
        """
        with sharding.use_rules(self.step.step.model.rules):
            none = jax.tree.leaves(experts)[0].shape[0]
            out, _ = self._experts(experts)(h, jnp.where(shares == 0, none, table[chosen]), shares, partial=True)
        return out if total is None else total + out

    def expert(self, expert: Any, rows: Float[Array, "n D"], weights: Float[Array, " n"]) -> Float[Array, "n D"]:
        """Weighted outputs of one expert."""
        with sharding.use_rules(self.step.step.model.rules):
            first = jnp.zeros((1, rows.shape[0], 1), jnp.int32)
            return self._experts(expert)(rows[None], first, weights[None, :, None])[0][0]

    def _experts(self, experts: Any) -> Any:
        """The experts' module with these matrices; the block's other weights, which it does not read, are zeros."""
        rest = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.rest)
        return self._module(with_experts(rest, experts), jnp.int32(0)).mlp.experts

    def join(
        self,
        params: Any,
        weights: Any,
        batch: tuple[Any, ...],
        layer: Int[Array, ""],
        x: LayerStream,
        h: Float[Array, "B T D"],
        total: Float[Array, "B T D"],
    ) -> LayerStream:
        """The residual stream after the layer."""
        with sharding.use_rules(self.step.step.model.rules):
            block = self._module(self._adapted(params, weights, batch, layer), layer)
            plain = block.add(plain_of(x), block.mlp.with_shared(h, total))
        return x._replace(plain=plain) if isinstance(x, GatedStream) else plain

    def predict(self, weights: Any, x: LayerStream) -> Int[Array, "B T A"]:
        """Experts that this layer's router would choose for the stream of the mixture before; or chooses, if it reads
        that one's input. E stands for one of weight 0.
        """
        with sharding.use_rules(self.step.step.model.rules):
            block, plain = self._module(weights, jnp.int32(0)), plain_of(x)
            h = block.mlp_norm(plain) if block.norms != "post" else plain
            routing = block.mlp.routing(h, x.gate if isinstance(x, GatedStream) else None)
            return jnp.where(routing.weights == 0, routing.shares.shape[-1], routing.experts)


def with_experts(weights: Any, experts: Any) -> Any:
    """Weights of a block with these matrices of its experts."""
    return weights | {"mlp": weights["mlp"] | {"experts": experts}}
