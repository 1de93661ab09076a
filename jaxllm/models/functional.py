"""Functional decoder: pure functions over plain parameter trees, derived from the NNX declarations of the model.

NNX only declares weights; these functions run the model. Parameters are nested dicts of arrays. The layers of a segment
are stacked along a leading ``layers`` dimension and scanned, so one block is compiled whatever the depth of the model.
``unstack_layers`` gives another form of the same tree for decoding, which is bound by reading each layer's weights.

Legend: B batch, S sequence, D embed, V vocab, L layers.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

import sharding
from jaxllm.config import ConfigError
from jaxllm.models import remat
from jaxllm.models.attention_context import AttentionContext, LayerIndex, RowSplitContext, Segments
from jaxllm.models.batch_seed import with_batch_seed
from jaxllm.models.decoder import Block, DecoderConfig, Embedding, Head
from jaxllm.models.layers import stack_reads
from jaxllm.models.layers.residual_stream import GatedStream, Stream, as_kind, gated, residual_by_segment, whole
from jaxllm.models.layers.token_parts import PartsContext, TokenParts, through
from jaxllm.models.layers.values_by_layers import split_by_segment
from jaxllm.models.linear import Weight, Wrap, dense, linear_paths, map_weights, used, vocabulary_logits
from jaxllm.models.low_precision_matmul import LowPrecisionWeight, MatmulPrecision, init_amax_history, rounding_key
from jaxllm.models.packed_weight import within_stack
from jaxllm.models.params import allows_unreduced_grad, draw, on_device, role_of
from jaxllm.models.tpu_layout import materialized
from sharding import Rules, ShardingError
from sharding.layer_layouts import AXIS, rules_of

Params = dict[str, Any]
VOCABULARY = ("embedding/table", "head/weight")
"""Paths of the token embedding and, unless it is the same (tied), of the output matrix: both [V, D]."""


@dataclass(frozen=True)
class DeclaredParam:
    """Declared weight: its NNX variable and the leading dimensions it is stacked over."""

    param: nnx.Variable
    stack: tuple[int, ...]


@dataclass(frozen=True)
class LinearShape:
    """Shape of a ``Linear`` of the model: what an adapter of it must fit.

    Attributes:
        stack: leading dimensions that it is stacked over (layers).
        shape: ``[*in, *out]`` without them; the matrices of experts have their number first.
        axes: logical axes of ``shape``.
        contract: number of dimensions in ``*in``.
        dtype: of the parameter.
        lead: number of dimensions before ``*in``: 1 for the matrices of experts, else 0.
    """

    stack: tuple[int, ...]
    shape: tuple[int, ...]
    axes: sharding.LogicalAxes
    contract: int
    dtype: Any
    lead: int = 0

    @property
    def inputs(self) -> tuple[int, ...]:
        """Sizes of ``*in``."""
        return self.shape[self.lead : self.lead + self.contract]

    @property
    def outputs(self) -> tuple[int, ...]:
        """Sizes of ``*out``."""
        return self.shape[self.lead + self.contract :]


@dataclass(frozen=True, eq=False)
class Functional:
    """Decoder as pure functions: ``embed``, ``blocks``, ``head`` and their composition ``forward``.

    Created by ``functional``; jit the methods or anything built of them. The sharding rules are part of the object, so
    a compiled function never outlives the rules it was traced under.

    Attributes:
        config: architecture.
        rules: sharding rules (logical axes to mesh axes) of parameters and activations.
        adapt: changes the declared parameters: puts adapted or packed weights in the place of arrays
            (``jaxllm.peft.adapted_model``); None: nothing.
        training_context: ``(segment_ids, layout) -> context``: attention context of the training loss.
        text_context: the same of all other passes over packed rows, such as evaluation.
    """

    config: DecoderConfig
    rules: Rules
    # The declared parts with abstract values, {"embedding", "segments", "head"} -> (graphdef, state), and the paths of
    # each block's weights of matmuls, "linears".
    _modules: Any
    adapt: Callable[[Params], Params] | None = None
    training_context: Callable[..., Any] = Segments
    text_context: Callable[..., Any] = Segments

    def init(
        self, key: PRNGKeyArray, shardings: Params | None = None, put: Callable[[Array, Any], Any] | None = None
    ) -> Params:
        """Randomly initialised parameters, created sharded when ``shardings`` (a tree of NamedSharding) is given.

        The RNG key of a weight is folded from its path, so its value depends on the seed and its name alone.

        Args:
            key: of all weights.
            shardings: of the weights; with ``put``, leaves that have a sharding.
            put: ``(weight, its leaf of shardings) -> what takes its place in the tree``, called weight by weight.
        """

        def draw_leaf(path: tuple, leaf: DeclaredParam, out: NamedSharding | None = None) -> Array:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            return draw(leaf.param, jax.random.fold_in(key, zlib.crc32(name.encode())), leaf.stack, out)

        declared = self.declared()
        if shardings is None:
            return jax.tree.map_with_path(draw_leaf, declared)
        if put is not None:
            place = lambda path, leaf, to: put(draw_leaf(path, leaf, to.sharding), to)  # noqa: E731
            return jax.tree.map_with_path(place, declared, shardings)
        return jax.tree.map_with_path(draw_leaf, declared, shardings)

    def abstract(self) -> Params:
        """Abstract parameters: shape and dtype of each, nothing allocated."""

        def shape(leaf: DeclaredParam) -> jax.ShapeDtypeStruct:
            value = leaf.param.get_value()
            return jax.ShapeDtypeStruct((*leaf.stack, *value.shape), value.dtype)

        return jax.tree.map(shape, self.declared())

    def logical_axes(self) -> Params:
        """Logical axes of every parameter, in the same tree; those of stacked parameters begin with ``layers``."""

        def axes(leaf: DeclaredParam) -> sharding.LogicalAxes:
            return ("layers",) * len(leaf.stack) + leaf.param.get_metadata()["logical_axes"]

        return jax.tree.map(axes, self.declared())

    def matrices(self) -> Params:
        """Tree of booleans: True for parameters used in matmuls and lookups, False for gains and biases."""
        return jax.tree.map(lambda leaf: allows_unreduced_grad(leaf.param), self.declared())

    def roles(self) -> Params:
        """Role of every parameter (``jaxllm.models.params.Role``), in the same tree."""
        return jax.tree.map(lambda leaf: role_of(leaf.param), self.declared())

    def linears(self, *, experts: bool = False) -> dict[str, LinearShape]:
        """Every ``Linear`` of a block by the path of its parameter ("segments/0/0/attention/q").

        Args:
            experts: with the matrices of experts, which are multiplied in groups.
        """
        found: dict[str, LinearShape] = {}
        for s, group in enumerate(self._modules["segments"]):
            for b, (graphdef, state) in enumerate(group):
                block = nnx.merge(graphdef, state)
                for path in linear_paths(block, experts=True) if experts else self._modules["linears"][s][b]:
                    one = functools.reduce(getattr, path, block)
                    meta, value = one.get_metadata(), one.get_value()
                    stack, name = (self.config.segments[s][1],), "/".join(("segments", str(s), str(b), *path))
                    axes, contract = meta["logical_axes"], meta["contract"]
                    lead = int("experts" in axes)
                    found[name] = LinearShape(stack, value.shape, axes, contract, value.dtype, lead)
        return found

    def map_matrices(self, params: Params, fn: Callable[[str, Any, int], Any]) -> Params:
        """Parameter tree with ``fn(path, weight, axis)`` in place of every matrix of a block.

        ``axis`` is the last dimension that a matmul with the weight sums over, counted from the end.
        """

        def one(path: tuple, leaf: DeclaredParam, value: Any) -> Any:
            meta, axes = leaf.param.get_metadata(), leaf.param.get_metadata()["logical_axes"]
            if meta["role"] != "matrix" or not leaf.stack:
                return value
            axis = ("experts" in axes) + meta["contract"] - 1 - len(axes)
            return fn(jax.tree_util.keystr(path, simple=True, separator="/"), value, axis)

        return jax.tree.map_with_path(one, self.declared(), params)

    def contracted(self) -> Params:
        """Number of dimensions that a matmul with each matrix of a block sums over, in the same tree; else 0."""

        def count(leaf: DeclaredParam) -> int:
            meta = leaf.param.get_metadata()
            return meta["contract"] if meta["role"] == "matrix" and leaf.stack else 0

        return jax.tree.map(count, self.declared())

    def gather(self, params: Params) -> Params:
        """Parameters all-gathered over the mesh axes that only their storage is split over (FSDP, ZeRO-1 and 2).

        The result serves one forward and backward pass or several. Parameters of matmuls and lookups are cast to
        compute dtype, and their gradients stay partial sums per device, see ``sharding.gather_weight``; gains and
        biases keep their dtype.
        """

        def one(leaf: DeclaredParam, value: Array) -> Array:
            matrix = allows_unreduced_grad(leaf.param)
            axes = ("layers",) * len(leaf.stack) + leaf.param.get_metadata()["logical_axes"]
            if matrix:
                value = value.astype(self.config.dtype)
            return sharding.gather_weight(value, *axes, unreduced_grad=matrix)

        with sharding.use_rules(self.rules):
            return jax.tree.map(one, self.declared(), params)

    def gather_for_step(self, params: Params) -> Params:
        """Parameters all-gathered for a step over the axes that they are split over between steps alone (3-level ZeRO).

        Parameters of matmuls and lookups are cast to compute dtype and stay split over the other axes of their storage;
        gains and biases keep their dtype and are all-gathered whole. See ``sharding.gather_for_step``.
        """

        def one(leaf: DeclaredParam, value: Array) -> Array:
            matrix = allows_unreduced_grad(leaf.param)
            axes = ("layers",) * len(leaf.stack) + leaf.param.get_metadata()["logical_axes"]
            value = value.astype(self.config.dtype) if matrix else value
            return sharding.gather_for_step(value, *axes, unreduced_grad=matrix)

        with sharding.use_rules(self.rules):
            return jax.tree.map(one, self.declared(), params)

    def in_compute_dtype(self, params: Params) -> Params:
        """Parameters for forward passes alone: matrices and embeddings in compute dtype, to which each forward pass
        casts them before it uses them, so that its results stay the same. Routers, gains and biases are used in a wider
        dtype and keep theirs.
        """

        def one(leaf: DeclaredParam, value: Array) -> Array:
            return value.astype(self.config.dtype) if role_of(leaf.param) in ("matrix", "embedding") else value

        return jax.tree.map(one, self.declared(), params)

    def declared(self) -> Params:
        """Parameter tree of declarations, each with the dimensions it is stacked over."""

        def tree(state: Any, *stack: int) -> Params:
            is_variable = lambda v: isinstance(v, nnx.Variable)  # noqa: E731
            return nnx.to_pure_dict(jax.tree.map(lambda v: DeclaredParam(v, stack), state, is_leaf=is_variable))

        declared = {
            "embedding": tree(self._modules["embedding"][1]),
            "segments": {
                str(s): {str(b): tree(state, self.config.segments[s][1]) for b, (_, state) in enumerate(group)}
                for s, group in enumerate(self._modules["segments"])
            },
            "head": tree(self._modules["head"][1]),
        }
        return declared if self.adapt is None else self.adapt(declared)

    def embed(self, params: Params, tokens: Int[Array, "B S"], positions: Int[Array, "B S"]) -> Float[Array, "B S D"]:
        """Token embeddings in compute dtype, plus position embeddings where the model learns them."""
        with sharding.use_rules(self.rules), jax.named_scope("embed"):
            return nnx.merge(self._modules["embedding"][0], params["embedding"])(tokens, positions)

    def blocks(
        self,
        params: Params,
        x: Float[Array, "B S D"] | TokenParts,
        positions: Int[Array, "B S"] | TokenParts,
        ctx: AttentionContext | PartsContext,
    ) -> tuple[Any, Any]:
        """Transformer blocks of all segments. The context is a carry of the scan: its KV cache is updated in place.

        Args:
            x: residual stream; in parts, each block runs for one after the other, see ``token_parts``.
            positions: in the same parts.
            ctx: attention context, of the parts if there are some.

        Returns:
            the residual stream, in the same parts, and the attention context.
        """
        first, stream = 0, self.stream(x)
        with sharding.use_rules(self.rules):
            for s, (group, repeats) in enumerate(self.config.segments):
                stream, ctx = self._segment(s, first, params["segments"][str(s)], stream, positions, ctx)
                first += len(group) * repeats
            return self._laid(whole(stream))[0], ctx

    def _laid(self, x: Stream, ctx: Any = None) -> tuple[Stream, Any]:
        """Residual stream and context split as the rules in force split them, where layers have their own layouts."""
        if not self.rules.layouts:
            return x, ctx
        here = "batch", "residual_seq", "act_embed"
        x = jax.tree.map(lambda part: sharding.constrain(part, *here) if part.ndim == len(here) else part, x)
        return x, ctx.split_rows() if isinstance(ctx, RowSplitContext) else ctx

    def stream(self, x: Any) -> Any:
        """The residual stream at the first layer, of what ``embed`` returns: plain, or with the input of a router.

        Raises:
            ConfigError: tokens in parts, of a model whose routers read the mixture before.
        """
        if not self.config.pre_gated:
            return x
        if isinstance(x, TokenParts):
            raise ConfigError(
                "model: router.input = 'previous' does not go with tokens in parts: leave overlap out, or choose 'own'."
            )
        return gated(x)

    def group(
        self,
        s: int,
        params: Params,
        x: Float[Array, "B S D"] | GatedStream,
        positions: Int[Array, "B S"],
        first: Any,
        ctx: Any,
        wrap: Wrap | None = None,
    ) -> tuple[Any, AttentionContext]:
        """One repeat of segment ``s``, whose blocks are layers ``first`` and following; ``params`` are not stacked.

        Parameters in host memory are copied to the device first.

        Args:
            x: the residual stream: plain, or as ``stream`` makes it.
            wrap: replaces the weights of matmuls, for remat policies; None: none.

        Raises:
            ConfigError: the model has another residual stream than ``x``.
        """
        self._check_stream(isinstance(x, GatedStream))
        return self._group(self.rules, s, params, x, positions, first, ctx, wrap)

    def _check_stream(self, gated: bool) -> None:
        if self.config.pre_gated and not gated:
            raise ConfigError(
                "model: router.input = 'previous' passes the input of a mixture on to the next one, which pipeline "
                "stages, parameters on disk, drafts by layers in parallel, calibration and optimizers that go layer by "
                "layer do not do: leave them out, or choose router.input = 'own'."
            )
        if self.rules.layouts:
            raise ConfigError(
                "parallel: layers gives layers layouts of their own, which pipeline stages, parameters on disk and "
                'optimizers that go layer by layer do not have: leave them out, or set parallel.layers to "tensor".'
            )
        if self.config.residual != "plain":
            raise ConfigError(
                f"model: residual = {self.config.residual!r} needs all layers in one program, which pipeline stages, "
                "streamed weights, drafts by layers in parallel and optimizers that go layer by layer do not have: "
                "leave them out, or choose residual = 'plain'."
            )

    def _group(
        self, rules: Rules, s: int, params: Params, x: Stream, positions: Any, first: Any, ctx: Any, wrap: Wrap | None
    ) -> tuple[Any, Any]:
        with sharding.use_rules(rules), jax.named_scope("layers"):
            for b in range(len(self._modules["segments"][s])):
                x, ctx = through(self._block(s, b, params[str(b)], first + b, wrap), x, positions, first + b, ctx)
        return x, ctx

    def block(
        self, s: int, b: int, params: Params, layer: Any, wrap: Wrap | None = None, *, gated: bool = False
    ) -> Block:
        """Block ``b`` of a repeat of segment ``s`` with its parameters, to be called under the model's rules.

        Args:
            params: its parameters, not stacked.
            layer: its number in the model.
            wrap: see ``group``.
            gated: the caller passes on the input of mixtures, see ``stream``.

        Raises:
            ConfigError: as ``group``.
        """
        self._check_stream(gated)
        return self._block(s, b, params, layer, wrap)

    def _block(self, s: int, b: int, params: Params, layer: Any, wrap: Wrap | None) -> Block:
        kind: MatmulPrecision = self.config.matmul_precision

        def weight(value: Array | Weight, matmul: int) -> Array | Weight:
            if kind != "plain" and isinstance(value, jax.Array):
                key = rounding_key(layer, matmul) if kind == "mxfp4" else None
                value = LowPrecisionWeight(value, kind, key=key)
            return value if wrap is None else wrap(value)

        own = map_weights(jax.tree.map(on_device, params), self._modules["linears"][s][b], weight)
        return nnx.merge(self._modules["segments"][s][b][0], own)

    def init_amax_history(self) -> dict[str, dict[str, Float[Array, "L P 3 H"]]]:
        """Empty amax history of "fp8_delayed" of every matmul with a weight of a block, by segment and block."""
        return {
            str(s): {str(b): init_amax_history(len(paths), self.config.segments[s][1]) for b, paths in enumerate(group)}
            for s, group in enumerate(self._modules["linears"])
        }

    def with_amax_history(self, params: Params, seen: Params | None) -> Params:
        """Parameters with the amax history of each block's matmuls ("fp8_delayed"), so that it is differentiated too.

        Args:
            seen: amax histories by segment and block, see ``init_amax_history``; None returns ``params`` unchanged.
        """
        if seen is None:
            return params
        kind: MatmulPrecision = self.config.matmul_precision
        segments = {
            s: {
                b: map_weights(
                    block,
                    self._modules["linears"][int(s)][int(b)],
                    lambda weight, i, own=seen[s][b]: LowPrecisionWeight(weight, kind, own[:, i]),
                )
                for b, block in blocks.items()
            }
            for s, blocks in params["segments"].items()
        }
        return params | {"segments": segments}

    def _segment(
        self,
        s: int,
        first: int,
        params: Params | tuple[Params, ...],
        x: Stream,
        positions: Array | TokenParts,
        ctx: AttentionContext | PartsContext,
    ) -> tuple[Stream, Any]:
        size, repeats = len(self.config.segments[s][0]), self.config.segments[s][1]
        pieces = _pieces(self.config, self.rules, s)
        params, join = (params, lambda own, repeat: own) if isinstance(params, tuple) else within_stack(params)

        def group_of(rules: Rules) -> remat.Body:
            """Body of a scan, of its own for each piece: JAX caches the traces of a function."""
            own_positions = _of_rows(positions) if rules is not self.rules else positions

            def group(
                carry: tuple[Stream, Any], step: tuple[Params, LayerIndex], wrap: Wrap | None = None
            ) -> tuple[Any, None]:
                group_params, layer = join(step[0], step[1]), first + step[1] * size
                return self._group(rules, s, group_params, carry[0], own_positions, layer, carry[1], wrap), None

            return group

        if isinstance(params, tuple):
            start = 0
            for name, kind, rules, count in pieces:
                with sharding.use_rules(rules):
                    carry, body = self._laid(as_kind(x, kind), ctx), remat.checkpointed(name, group_of(rules))
                    for repeat in range(start, start + count):
                        carry, _ = body(carry, (params[repeat], jnp.int32(repeat)))
                    (x, ctx), start = carry, start + count
            return x, ctx
        numbers, unroll = jnp.arange(repeats, dtype=jnp.int32), self.config.unroll
        if len(pieces) == 1:
            ((name, kind, rules, _),) = pieces
            with sharding.use_rules(rules):
                carry = self._laid(as_kind(x, kind), ctx)
                return remat.scan(name, group_of(rules), carry, (params, numbers), repeats, unroll or repeats)

        def reading(group: remat.Body) -> remat.Body:
            def read(
                carry: tuple[Stream, Any, Any], step: tuple[LayerIndex], wrap: Wrap | None = None
            ) -> tuple[Any, None]:
                own, gradient = stack_reads.read(frozen, carry[2], *step)
                out, _ = group(carry[:2], (own, *step), wrap)
                return (*out, gradient), None

            return read

        start, frozen, gradient = 0, jax.lax.stop_gradient(params), stack_reads.gradient_of(params)
        for name, kind, rules, count in pieces:
            steps = (numbers[start : start + count],)
            start += count
            with sharding.use_rules(rules):
                carry, body = (*self._laid(as_kind(x, kind), ctx), gradient), reading(group_of(rules))
                x, ctx, gradient = remat.scan(name, body, carry, steps, count, unroll or count)
        return x, ctx

    def unembed(self, params: Params, hidden: Float[Array, "*B D"]) -> tuple[Float[Array, "*B D"], Float[Array, "V D"]]:
        """Operands of the logits matmul: normalised hidden states and the output matrix.

        They are separate so that the loss can be computed in chunks and an engine can project only the rows that it
        samples. The caller applies ``config.logit_softcap`` (``cap_logits``) to the logits. A packed output matrix is
        dequantised.
        """
        normed, weight = self._head_operands(params, hidden)
        return normed, dense(weight, jnp.dtype(self.config.dtype))

    def _head_operands(self, params: Params, hidden: Float[Array, "*B D"]) -> tuple[Float[Array, "*B D"], Any]:
        """Operands of the logits matmul; the output matrix, of whatever kind it is, is gathered."""
        with sharding.use_rules(self.rules), jax.named_scope("head"):
            where, name = self.vocabulary[-1]
            if isinstance(params[where][name], Array):
                # The gradient of the weight is so reduced before the layers' backward pass, not alive beside it whole.
                hidden, weight = materialized(hidden, params[where][name])
                params = params | {where: params[where] | {name: weight}}
            graphdef, declared = self._modules["head"]
            # Parameters beside those of the architecture, such as a value head, are not the module's.
            head = nnx.merge(graphdef, {name: params["head"][name] for name in declared})
            with jax.named_scope("final_norm"):
                normed = head.norm(hidden)
            own = (
                nnx.merge(self._modules["embedding"][0], params["embedding"]).table if self.config.tied else head.weight
            )
            return normed, used(own, jnp.dtype(self.config.dtype))

    @property
    def vocabulary(self) -> tuple[tuple[str, str], ...]:
        """Keys of the token embedding and of the output matrix, where it is another; the last is the head's."""
        paths = VOCABULARY[:1] if self.config.tied else VOCABULARY
        return tuple((path.split("/")[0], path.split("/")[1]) for path in paths)

    def head(self, params: Params, hidden: Float[Array, "B S D"], *, whole: bool = False) -> Float[Array, "B S V"]:
        """Logits in at least float32.

        Args:
            whole: each row on every device of its replica; the logits are gathered in the dtype of the matmul.
        """
        hidden, weight = self._head_operands(params, hidden)
        with sharding.use_rules(self.rules), jax.named_scope("head"):
            logits = vocabulary_logits(hidden, weight, out=("batch", "seq", "act_vocab"))
            if whole:
                logits = sharding.constrain(logits, "batch", None, None)
        return cap_logits(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)), self.config.logit_softcap)

    def forward(
        self, params: Params, tokens: Int[Array, "B S"], positions: Int[Array, "B S"], ctx: AttentionContext
    ) -> tuple[Float[Array, "B S D"], AttentionContext]:
        """Hidden states before the head, and the updated attention context: training, prefill and decode alike."""
        draws = remat.draws(self.config.remat) or self.config.matmul_precision == "mxfp4"
        with with_batch_seed(tokens) if draws else contextlib.nullcontext():
            return self.blocks(params, self.embed(params, tokens, positions), positions, ctx)


def _pieces(config: DecoderConfig, rules: Rules, s: int) -> list[tuple[remat.Policy, str, Rules, int]]:
    """Runs of segment ``s``'s layers that are alike, in order, each with its number of repeats.

    Returns:
        remat policy, kind of residual stream, sharding rules and repeats of each.
    """
    policies = remat.policies_by_segment(config.remat, config.segments)[s]
    kinds = residual_by_segment(config.residual, config.segments)[s]
    layouts = layouts_by_segment(rules, config)[s]
    columns = [[value for value, count in one for _ in range(count)] for one in (policies, kinds, layouts)]
    return [
        (name, kind, rules_of(rules, layout) if rules.layouts else rules, len(list(same)))
        for (name, kind, layout), same in itertools.groupby(zip(*columns, strict=True))
    ]


def layouts_by_segment(rules: Rules, config: DecoderConfig) -> list[list[tuple[str, int]]]:
    """Layouts (``sharding.layer_layouts``) of each segment's layers in order, each with its number of repeats.

    Raises:
        ShardingError: the numbers of layers do not add up, or a layout ends inside a group that repeats together.
    """
    try:
        return split_by_segment(rules.layouts or ((AXIS, None),), config.segments)
    except ValueError as error:
        said = ",".join(layout if count is None else f"{layout}={count}" for layout, count in rules.layouts)
        raise ShardingError(
            f'parallel: layers = "{said}" {error} Give numbers of layers that add up to {config.layers}, or leave out '
            "the last."
        ) from None


def _of_rows(positions: Array | TokenParts) -> Array | TokenParts:
    """Positions split by rows as the rules in force split them."""
    return jax.tree.map(lambda x: sharding.constrain(x, "batch", "seq"), positions)


def cap_logits(logits: Float[Array, "*B V"], softcap: float | None) -> Float[Array, "*B V"]:
    """Soft-capped logits, ``softcap * tanh(logits / softcap)``; unchanged when ``softcap`` is None."""
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def functional(config: DecoderConfig, rules: Rules = sharding.DEFAULT) -> Functional:
    """Functional decoder of a configuration. Cheap: nothing is allocated.

    Raises:
        ShardingError: the rules have layouts of layers that do not fit those of the model.
    """
    layouts_by_segment(rules, config)
    blocks = [[Block(block, config) for block in group] for group, _ in config.segments]
    modules = {
        "embedding": nnx.split(Embedding(config)),
        "segments": [[nnx.split(block) for block in group] for group in blocks],
        "linears": [[linear_paths(block) for block in group] for group in blocks],
        "head": nnx.split(Head(config)),
    }
    return Functional(config, rules, modules)


def unstack_layers(params: Params, *, donate: bool = False) -> Params:
    """Parameters with one array per layer instead of stacks: ``segments`` hold a tuple over their repeats.

    ``Functional.forward`` and its parts take either form; training, ``gather`` and checkpoints need stacks. On CPUs and
    GPUs XLA copies a layer out of its stack before the matmul, even in an unrolled loop, which doubles or trebles the
    bytes that a decode step reads. In exchange the program grows with the depth of the model.

    Args:
        donate: free each stack as soon as its layers are copied; ``params`` cannot be used afterwards.
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


def has_unstacked_layers(params: Params) -> bool:
    """Whether parameters have one array per layer, see ``unstack_layers``."""
    return any(isinstance(segment, tuple) for segment in params["segments"].values())


@jax.jit
def _rows(stack: Shaped[Array, "L *shape"]) -> tuple[Shaped[Array, "*shape"], ...]:
    return tuple(stack)


def param_count(params: object) -> int:
    """Number of parameters in a tree of arrays or abstract arrays."""
    return sum(int(leaf.size) for leaf in jax.tree.leaves(params))
