"""Setting of a comparison: model, batch, precision, and the matmuls that a training step consists of.

Plain Python, so that a peer's interpreter needs nothing of ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Product(NamedTuple):
    """``count`` matrix products a step: ``batch`` of [rows, inner] x [inner, columns].

    layout: which operand lies transposed in memory: "NN" neither, "NT" the right one, "TN" the left one.
    """

    layout: str
    batch: int
    rows: int
    inner: int
    columns: int
    count: float

    @property
    def flops(self) -> float:
        """FLOPs of one such matmul."""
        return 2.0 * self.batch * self.rows * self.inner * self.columns


@dataclass(frozen=True)
class Setting:
    """A decoder trained with AdamW, without clipping, on ``batch`` rows of ``seq_len`` tokens.

    The default is a Llama of 29.4M parameters, float32, batches of 8 x 512 tokens.

    Attributes:
        family: "llama" (rotated positions, RMS norm, gated feed-forward, no biases) or "gpt2" (1024 learned positions,
            layer norm, tanh's GELU, biases).
        hidden, mlp: widths of the residual stream and the feed-forward layer.
        tied: the output head is the embedding.
        prompt, new_tokens: of decoding.
        precision: of ``jaxllm.train.precision``: "bf16" keeps parameters in float32.
        remat: "elementwise": no product is done again; "full": each block is.
        device: "cpu", "gpu" or "tpu".
    """

    family: str = "llama"
    layers: int = 8
    hidden: int = 512
    mlp: int = 1536
    heads: int = 8
    kv_heads: int = 4
    vocab: int = 8192
    tied: bool = True
    batch: int = 8
    seq_len: int = 512
    prompt: int = 128
    new_tokens: int = 128
    learning_rate: float = 1e-4
    precision: str = "float32"
    remat: str = "elementwise"
    device: str = "cpu"

    @property
    def head_dim(self) -> int:
        """Dimension of one head."""
        return self.hidden // self.heads

    @property
    def tokens(self) -> int:
        """Tokens of a train step."""
        return self.batch * self.seq_len

    def products(self) -> list[Product]:
        """The matrix products of a train step: three for each weight; six for attention, the causal half of each."""
        kv = self.kv_heads * self.head_dim
        gated = self.family == "llama"
        weights = [  # in, out, how many
            (self.hidden, self.hidden, 2 * self.layers),
            (self.hidden, kv, 2 * self.layers),
            (self.hidden, self.mlp, (2 if gated else 1) * self.layers),
            (self.mlp, self.hidden, self.layers),
            (self.hidden, self.vocab, 1),
        ]
        out = []
        for rows, columns, count in weights:
            out.append(Product("NN", 1, self.tokens, rows, columns, count))  # forward
            out.append(Product("NT", 1, self.tokens, columns, rows, count))  # gradient of the input
            out.append(Product("TN", 1, rows, self.tokens, columns, count))  # gradient of the weight
        pairs, s, h = self.batch * self.heads, self.seq_len, self.head_dim
        out.append(Product("NT", pairs, s, h, s, 0.5 * 2 * self.layers))  # scores; gradient of the weights
        out.append(Product("NN", pairs, s, s, h, 0.5 * 2 * self.layers))  # values; gradient of the queries
        out.append(Product("TN", pairs, s, s, h, 0.5 * 2 * self.layers))  # gradients of keys and values
        return out
