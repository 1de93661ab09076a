"""Head-wise recurrent layer in the place of attention: LSTM, GRU or sLSTM with one recurrent matrix per head and gate.

The layer projects its input to gate inputs, runs the recurrent network over the tokens of each document, and projects
the hidden states back (FlashRNN, arXiv:2412.07752; sLSTM of xLSTM, arXiv:2405.04517). It has no keys and values, so
that no KV cache serves it. The sequence is not split over devices; heads and rows are.

Legend: B batch, S sequence, D embed, N heads, G gates, H head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

import sharding
from jaxllm.config import ConfigError
from jaxllm.models.attention_context import AttentionContext, AttentionParams, KVSpec, LayerIndex
from jaxllm.models.layers.layer import AttentionLayer, MatmulInput, MatmulValue, unusual
from jaxllm.models.layers.norm import Norm, NormKind
from jaxllm.models.linear import linear, project_many
from jaxllm.models.params import constant, declare, gathered, use
from pallas_kernels.recurrent import CELLS, recurrent

GATE_AXES = ("batch", "seq", "act_heads", None, None)
MATRIX_AXES = ("heads", None, None, "head_dim")


@dataclass(frozen=True)
class RecurrentConfig(AttentionLayer):
    """Head-wise recurrent layer.

    Attributes:
        cell: "lstm", "gru" or "slstm".
        heads: heads, each with recurrent matrices of its own.
        head_dim: elements of a head's hidden state.
        out_norm: norm of the hidden states before the output projection: of each "head" by itself, of the model's kind
            and with one gain for all heads; or "none".
    """

    cell: Literal["lstm", "gru", "slstm"] = "slstm"
    heads: int = 4
    head_dim: int = 64
    out_norm: Literal["head", "none"] = "head"

    has_keys = False
    window = None
    rope = None
    kv_heads = 0
    key_dim = 0

    def __post_init__(self) -> None:
        for name in ("heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"recurrent layer: {name} = {getattr(self, name)}; give a positive number.")

    @property
    def value_dim(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Elements of a hidden state per head."""
        return self.head_dim

    @property
    def gates(self) -> int:
        """Gates of the cell."""
        return len(CELLS[self.cell].gates)

    @property
    def attention_params(self) -> AttentionParams:
        """Refused: nothing is attended to."""
        raise self._no_keys()

    @property
    def kv_spec(self) -> KVSpec:
        """Refused: there are no keys and values."""
        raise self._no_keys()

    def _no_keys(self) -> ConfigError:
        return ConfigError(
            f"a recurrent layer ({self.cell}) has no keys and values, so it has no KV cache and is not served: choose "
            "attention layers for a model that generates text. Training, evaluation by loss and checkpoints support it."
        )

    @property
    def attention_macs(self) -> int:
        """Multiply-adds per pair of tokens: none."""
        return 0

    def build(
        self, embed_dim: int, *, norm: NormKind, norm_eps: float, out_scale: float, dtype: jnp.dtype
    ) -> nnx.Module:
        """Module of the layer."""
        return RecurrentLayer(self, embed_dim, norm=norm, norm_eps=norm_eps, out_scale=out_scale, dtype=dtype)

    def weight_macs(self, embed_dim: int) -> int:
        """Multiply-adds of one token with the projections and the recurrent matrices."""
        width = self.heads * self.head_dim
        return width * (self.gates * (embed_dim + self.head_dim) + embed_dim)

    def matmul_inputs(self, embed_dim: int) -> tuple[MatmulInput, ...]:
        """Inputs of the gate projection and of the output projection."""
        return (embed_dim, 1), (self.heads * self.head_dim, 1)

    def matmul_values(self, embed_dim: int) -> tuple[MatmulValue, ...]:
        """Gate inputs, which gradient checkpointing keeps as "q", and states, which it keeps as "attention"."""
        width = self.heads * self.head_dim
        gates = MatmulValue("q", self.gates * width, embed_dim * self.gates * width, ())
        states = (1 + len(CELLS[self.cell].states)) * width
        return gates, MatmulValue("attention", states, self.gates * width * self.head_dim, ("q",))

    def without_traffic_formula(self, tensor: int, kv_shards: int) -> list[str]:
        """Features whose collectives have no formula."""
        return ["recurrent layers"]

    def describe(self) -> str:
        """One line for people."""
        sizes = f"recurrent: {self.cell}, {self.heads} heads of {self.head_dim}"
        return "; ".join(part for part in (sizes, unusual(self, "cell", "heads", "head_dim")) if part)


class RecurrentLayer(nnx.Module):
    """Head-wise recurrent layer."""

    def __init__(
        self,
        config: RecurrentConfig,
        embed_dim: int,
        *,
        norm: NormKind,
        norm_eps: float,
        out_scale: float,
        dtype: jnp.dtype,
    ):
        d, n, g, h = embed_dim, config.heads, config.gates, config.head_dim
        self.config = config
        self.gates = linear("gates_proj", (d, n, g, h), ("embed", "heads", None, "head_dim"), dtype)
        self.gate_bias = constant(0.0, (n, g, h), ("heads", None, "head_dim"), dtype, role="bias")
        self.recurrent = declare(nnx.Param, (n, g, h, h), MATRIX_AXES, dtype, "recurrent", std=h**-0.5)
        if config.cell == "gru":
            self.candidate_bias = constant(0.0, (n, h), ("heads", "head_dim"), dtype, role="bias")
        if config.out_norm == "head":
            self.out_norm = Norm(norm, (h,), norm_eps, dtype, ("head_dim",))
        self.o = linear("o_proj", (n, h, d), ("heads", "head_dim", "embed"), dtype, contract=2, scale=out_scale)

    def __call__(
        self, x: Float[Array, "B S D"], positions: Int[Array, "B S"], layer: LayerIndex, ctx: AttentionContext
    ) -> tuple[Float[Array, "B S D"], AttentionContext]:
        """Output of the layer and the attention context, which it neither reads nor changes.

        Raises:
            ConfigError: the context is a KV cache.
            ShardingError: the sequence is split over devices.
        """
        if getattr(ctx, "is_kv_cache", False):
            raise self.config._no_keys()
        if sharding.axis_size("seq") > 1:
            raise sharding.ShardingError(
                f"a recurrent layer ({self.config.cell}) reads a sequence token by token, which "
                f"{sharding.axis_size('seq')} devices cannot split: leave context out of the mesh."
            )
        (gates,) = project_many(x, [self.gates], [GATE_AXES], over="act_heads")
        gates = gates + use(self.gate_bias, x.dtype)
        matrices = gathered(self.recurrent[...], x.dtype, MATRIX_AXES, False)
        bias = self._recurrent_bias(x.dtype)
        with jax.named_scope("kernel"):
            axes = (GATE_AXES, ("act_heads", None, None, None), ("act_heads", None, None), ("batch", "seq"))
            hidden = sharding.shard_map(self._run, axes, GATE_AXES[:-1])(gates, matrices, bias, positions == 0)
        if self.config.out_norm == "head":
            with jax.named_scope("norm"):
                hidden = self.out_norm(hidden)
        return self.o(hidden, ("batch", "residual_seq", "act_embed")), ctx

    def _recurrent_bias(self, dtype: jnp.dtype) -> Float[Array, "N G H"]:
        """Recurrent biases: of the candidate state of a GRU, which its reset gate scales; others are with the gates."""
        c = self.config
        if c.cell != "gru":
            return jnp.zeros((c.heads, c.gates, c.head_dim), dtype)
        candidate = use(self.candidate_bias, dtype)[:, None]
        return jnp.concatenate([jnp.zeros_like(candidate), jnp.zeros_like(candidate), candidate], axis=1)

    def _run(
        self,
        gates: Float[Array, "B S N G H"],
        matrices: Float[Array, "N G H H"],
        bias: Float[Array, "N G H"],
        resets: Bool[Array, "B S"],
    ) -> Float[Array, "B S N H"]:
        """Hidden states on one device; the states are zero before the first token of each document."""
        return recurrent(gates, matrices, bias, cell=self.config.cell, resets=resets)[0]
