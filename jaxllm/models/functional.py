"""Pure functions over plain parameter trees, from NNX declarations.

NNX declares; these functions execute. Parameters are nested dicts of arrays with every segment's layers stacked along
a leading ``layers`` dimension and scanned, so one block is compiled however deep the model is. ``unstack_layers`` makes
another form of the same tree, for decoding, where each layer's weights are read once and multiplied with little else.

Legend: B batch, S sequence, D embed, V vocab, L layers.
"""

from __future__ import annotations

import zlib
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int, PRNGKeyArray

import sharding
from jaxllm.models import remat
from jaxllm.models.attention_context import AttentionContext, LayerIndex
from jaxllm.models.decoder import Block, DecoderConfig, Embedding, Head
from jaxllm.models.low_precision_matmul import AMAX_HISTORY, LowPrecisionMatmul
from jaxllm.models.params import allows_unreduced_grad, draw, on_device, use
from sharding import Rules

Params = dict[str, Any]


@dataclass(frozen=True)
class DeclaredParam:
    """One weight: its NNX declaration and the leading dimensions it is stacked over."""

    param: nnx.Variable
    stack: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Functional:
    """A decoder as pure functions: ``embed``, ``blocks``, ``head`` and their composition ``forward``.

    Made by ``functional``; jit the methods or anything built of them. The sharding rules are part of the object, so
    a compiled function never outlives the rules it was traced under.

    Attributes:
        config: the architecture.
        rules: the sharding table its arrays follow.
    """

    config: DecoderConfig
    rules: Rules
    _modules: Any  # the declared parts with abstract values: {"embedding", "segments", "head"} -> (graphdef, state)

    def init(self, key: PRNGKeyArray, shardings: Params | None = None) -> Params:
        """Random parameters, each born in its shard when ``shardings`` (a tree of NamedSharding) is given.

        Every weight's key is folded from its path, so a weight's value depends on nothing but the seed and its name.
        """

        def draw_leaf(path: tuple, leaf: DeclaredParam, out: NamedSharding | None = None) -> Array:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            return draw(leaf.param, jax.random.fold_in(key, zlib.crc32(name.encode())), leaf.stack, out)

        declared = self._declared()
        if shardings is None:
            return jax.tree.map_with_path(draw_leaf, declared)
        return jax.tree.map_with_path(draw_leaf, declared, shardings)

    def abstract(self) -> Params:
        """Shape and dtype of every parameter, nothing allocated."""

        def shape(leaf: DeclaredParam) -> jax.ShapeDtypeStruct:
            value = leaf.param.get_value()
            return jax.ShapeDtypeStruct((*leaf.stack, *value.shape), value.dtype)

        return jax.tree.map(shape, self._declared())

    def logical_axes(self) -> Params:
        """Logical axes of every parameter, in the same tree; stacked ones begin with ``layers``."""

        def axes(leaf: DeclaredParam) -> sharding.LogicalAxes:
            return ("layers",) * len(leaf.stack) + leaf.param.get_metadata()["logical_axes"]

        return jax.tree.map(axes, self._declared())

    def matrices(self) -> Params:
        """For every parameter, whether products and lookups use it (True), or it is added or multiplied elementwise."""
        return jax.tree.map(lambda leaf: allows_unreduced_grad(leaf.param), self._declared())

    def gather(self, params: Params) -> Params:
        """All parameters whole over the axes they are stored split over, for a forward and backward pass or several.

        What products and lookups use is in compute dtype, and its gradient is left as a summand a device, see
        ``sharding.gather_weight``; gains and biases are as ``params`` has them.
        """

        def one(leaf: DeclaredParam, value: Array) -> Array:
            matrix = allows_unreduced_grad(leaf.param)
            axes = ("layers",) * len(leaf.stack) + leaf.param.get_metadata()["logical_axes"]
            if matrix:
                value = value.astype(self.config.dtype)
            return sharding.gather_weight(value, *axes, unreduced_grad=matrix)

        with sharding.use_rules(self.rules):
            return jax.tree.map(one, self._declared(), params)

    def _declared(self) -> Params:
        """The parameter tree with each weight's declaration and the dimensions it is stacked over."""

        def tree(state: Any, *stack: int) -> Params:
            is_variable = lambda v: isinstance(v, nnx.Variable)  # noqa: E731
            return nnx.to_pure_dict(jax.tree.map(lambda v: DeclaredParam(v, stack), state, is_leaf=is_variable))

        return {
            "embedding": tree(self._modules["embedding"][1]),
            "segments": {
                str(s): {str(b): tree(state, self.config.segments[s][1]) for b, (_, state) in enumerate(group)}
                for s, group in enumerate(self._modules["segments"])
            },
            "head": tree(self._modules["head"][1]),
        }

    def embed(self, params: Params, tokens: Int[Array, "B S"], positions: Int[Array, "B S"]) -> Float[Array, "B S D"]:
        """Token embeddings in compute dtype, and position embeddings where the model learns them."""
        with sharding.use_rules(self.rules):
            return nnx.merge(self._modules["embedding"][0], params["embedding"])(tokens, positions)

    def blocks(
        self, params: Params, x: Float[Array, "B S D"], positions: Int[Array, "B S"], ctx: AttentionContext
    ) -> tuple[Float[Array, "B S D"], AttentionContext]:
        """All transformer blocks. The context is a carry of the scan, so a cache in it is updated in place."""
        first = 0
        with sharding.use_rules(self.rules):
            for s, (group, repeats) in enumerate(self.config.segments):
                x, ctx = self._segment(s, first, params["segments"][str(s)], x, positions, ctx)
                first += len(group) * repeats
        return x, ctx

    def group(
        self, s: int, params: Params, x: Float[Array, "B S D"], positions: Int[Array, "B S"], first: Any, ctx: Any
    ) -> tuple[Float[Array, "B S D"], AttentionContext]:
        """One repeat of segment ``s``, whose blocks are layers ``first`` and following; ``params`` are not stacked.

        What of them is in the host's memory comes to the device for it.
        """
        kind = self.config.matmul_precision
        with sharding.use_rules(self.rules):
            for b, (graphdef, _) in enumerate(self._modules["segments"][s]):
                own = jax.tree.map(
                    on_device, {name: value for name, value in params[str(b)].items() if name != AMAX_HISTORY}
                )
                # Plain ones leave the product in force as it is: remat may have set one.
                other = kind != "plain"
                product = (
                    sharding.use_matmul(LowPrecisionMatmul(kind, params[str(b)].get(AMAX_HISTORY)))
                    if other
                    else nullcontext()
                )
                with product:
                    x, ctx = nnx.merge(graphdef, own)(x, positions, first + b, ctx)
        return x, ctx

    def with_amax_history(self, params: Params, seen: Params | None) -> Params:
        """Parameters with what "fp8_delayed" has seen of each block's products, which is theirs to take gradients of.

        Args:
            seen: by segment and block, ``jaxllm.models.low_precision_matmul.init_amax_history``; None: parameters as they are.
        """
        if seen is None:
            return params
        segments = {
            s: {b: {**block, AMAX_HISTORY: seen[s][b]} for b, block in blocks.items()}
            for s, blocks in params["segments"].items()
        }
        return params | {"segments": segments}

    def _segment(
        self,
        s: int,
        first: int,
        params: Params | tuple[Params, ...],
        x: Array,
        positions: Array,
        ctx: AttentionContext,
    ) -> tuple[Array, AttentionContext]:
        size, repeats = len(self.config.segments[s][0]), self.config.segments[s][1]

        def group(carry: tuple[Array, AttentionContext], step: tuple[Params, LayerIndex]) -> tuple[Any, None]:
            group_params, repeat = step
            return self.group(s, group_params, carry[0], positions, first + repeat * size, carry[1]), None

        pieces = remat.policies_by_segment(self.config.remat, self.config.segments)[s]
        carry = x, ctx
        if isinstance(params, tuple):
            names = [name for name, count in pieces for _ in range(count)]
            for repeat, (name, group_params) in enumerate(zip(names, params, strict=True)):
                carry, _ = remat.checkpointed(name, group)(carry, (group_params, jnp.int32(repeat)))
            return carry
        start, steps = 0, (params, jnp.arange(repeats, dtype=jnp.int32))
        for name, count in pieces:
            own = steps if count == repeats else jax.tree.map(lambda p, i=start, n=count: p[i : i + n], steps)
            carry = remat.scan(name, group, carry, own, count, self.config.unroll or count)
            start += count
        return carry

    def unembed(self, params: Params, hidden: Float[Array, "*B D"]) -> tuple[Float[Array, "*B D"], Float[Array, "V D"]]:
        """The two factors of the logits: normalised hidden states and the output matrix.

        Kept apart so that a loss can be computed in chunks and an engine can project only the rows it samples; whoever
        multiplies them applies ``config.logit_softcap`` (``cap_logits``).
        """
        with sharding.use_rules(self.rules):
            head = nnx.merge(self._modules["head"][0], params["head"])
            if self.config.tied:
                table = nnx.merge(self._modules["embedding"][0], params["embedding"]).table
            else:
                table = head.weight
            return head.norm(hidden), use(table, jnp.dtype(self.config.dtype))

    def head(self, params: Params, hidden: Float[Array, "B S D"]) -> Float[Array, "B S V"]:
        """Logits in at least float32."""
        hidden, weight = self.unembed(params, hidden)
        with sharding.use_rules(self.rules):
            logits = sharding.einsum("bsd,vd->bsv", hidden, weight, out=("batch", "seq", "act_vocab"))
        return cap_logits(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)), self.config.logit_softcap)

    def forward(
        self, params: Params, tokens: Int[Array, "B S"], positions: Int[Array, "B S"], ctx: AttentionContext
    ) -> tuple[Float[Array, "B S D"], AttentionContext]:
        """Hidden states before the head, and the context after this step: training, prefill and decode alike."""
        with remat.with_batch_seed(self.config.remat, tokens):
            return self.blocks(params, self.embed(params, tokens, positions), positions, ctx)


def cap_logits(logits: Float[Array, "*B V"], softcap: float | None) -> Float[Array, "*B V"]:
    """Logits bounded by ``softcap`` through tanh; as they are when it is None."""
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def functional(config: DecoderConfig, rules: Rules = sharding.DEFAULT) -> Functional:
    """The pure functions of a model. Cheap: nothing is allocated."""

    def declare(module: nnx.Module) -> tuple[Any, Any]:
        return nnx.split(module)

    modules = {
        "embedding": declare(Embedding(config)),
        "segments": [[declare(Block(block, config)) for block in group] for group, _ in config.segments],
        "head": declare(Head(config)),
    }
    return Functional(config, rules, modules)


def unstack_layers(params: Params, *, donate: bool = False) -> Params:
    """The same parameters with each layer's in arrays of their own: ``segments`` hold a tuple over their repeats.

    ``Functional.forward`` and its parts take either form; training, ``gather`` and checkpoints need stacks. XLA copies
    a layer out of its stack before it multiplies with it, on CPUs and GPUs even where the loop is unrolled, which
    doubles or trebles what a decoding step reads; in exchange a program is as long as the model is deep.

    Args:
        donate: give each stack's memory back as soon as its layers are made; ``params`` cannot be used afterwards.
    """

    def split(leaf: Array) -> tuple[Array, ...]:
        parts = _rows(leaf)
        if donate:
            jax.block_until_ready(parts)
            leaf.delete()
        return parts

    def segment(stacked: Params) -> tuple[Params, ...]:
        leaves, tree = jax.tree.flatten(stacked)
        return tuple(tree.unflatten(layer) for layer in zip(*map(split, leaves), strict=True))

    return params | {"segments": {name: segment(stacked) for name, stacked in params["segments"].items()}}


@jax.jit
def _rows(stack: Float[Array, "L *shape"]) -> tuple[Float[Array, "*shape"], ...]:
    return tuple(stack)


def param_count(params: object) -> int:
    """Number of parameters in a tree of arrays or abstract arrays."""
    return sum(int(leaf.size) for leaf in jax.tree.leaves(params))
