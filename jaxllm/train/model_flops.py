"""FLOPs of a token and their utilisation (arXiv:2204.02311, appendix B).

    MFU = model FLOPs per token x tokens per second / peak FLOP/s of all devices
    HFU = the same with the FLOPs that the devices really do: those of recomputation count too

A multiply-add is two FLOPs; the backward pass costs twice the forward. What a kernel recomputes inside itself counts in
neither.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxllm.models import (
    AttentionConfig,
    BlockConfig,
    DecoderConfig,
    MLAConfig,
    MlpConfig,
    MoeConfig,
    compact_matmul,
)
from jaxllm.models.remat import Policy, compact_share, offloaded_share, policies_by_layer


def forward_flops_per_token(config: DecoderConfig, attended: Callable[[int | None], float]) -> float:
    """FLOPs of one token's forward pass.

    Matrix multiplications only: two per weight that the token meets (of a mixture, the router's, the chosen experts'
    and the shared one's), embedding look-up free, output head included, and two for each product in the score and the
    value of each token that is attended to (``4 * heads * head_dim``).

    Args:
        attended: how many tokens one attends to on average under a window (None: no window).
    """
    total = 2.0 * config.embed_dim * config.vocab_size
    for block in config.blocks:
        a = block.attention
        total += _block_products(config, block) + 2.0 * a.attention_macs * attended(a.window)
    return total


def _block_products(config: DecoderConfig, block: BlockConfig) -> float:
    """FLOPs of a token's products with a block's weights."""
    d = config.embed_dim
    total = 2.0 * block.attention.projection_params(d)
    if isinstance(block.mlp, MoeConfig):
        widths = block.mlp.top_k * block.mlp.hidden + block.mlp.shared
        return total + 2.0 * d * (block.mlp.experts + 3 * widths)
    return total + 2.0 * (3 if block.mlp.gated else 2) * d * block.mlp.hidden


def causal_mean(seq_len: int, window: int | None) -> float:
    """Tokens attended to on average in a row of ``seq_len``: all before it and itself, the window's length at most."""
    w = min(seq_len, window or seq_len)
    return (w * (w + 1) / 2 + (seq_len - w) * w) / seq_len


def train_flops_per_token(config: DecoderConfig, seq_len: int) -> float:
    """FLOPs of one token in training on causal rows of ``seq_len`` tokens."""
    return 3.0 * forward_flops_per_token(config, lambda window: causal_mean(seq_len, window))


def hardware_flops_per_token(config: DecoderConfig, seq_len: int) -> float:
    """``train_flops_per_token`` and the matrix products that ``config.remat`` does again, layer by layer."""
    policies = zip(policies_by_layer(config.remat, config.segments), config.blocks, strict=True)
    again = sum(recomputed_flops(name, config, (block,), seq_len) for name, block in policies)
    return train_flops_per_token(config, seq_len) + again


def recomputed_flops(policy: Policy, config: DecoderConfig, blocks: Sequence[BlockConfig], seq_len: int) -> float:
    """FLOPs of a token's matrix products that blocks under a policy of ``model.remat`` do again.

    "none" and "elementwise" keep the results of all, "attention" those with weights. "full" does a block's again, but
    for the last of a dense one: the gradients need what goes into it, not what comes out. "sqrt" has done the whole
    forward pass again before that. "offload" does the products of the tokens that do not wait on the host, but for the
    last, and experts'. "compact" projects what it keeps of each product's input, and back.
    """
    if policy in ("none", "elementwise"):
        return 0.0
    total = 0.0
    for block in blocks:
        attended = 2.0 * block.attention.attention_macs * causal_mean(seq_len, block.attention.window)
        last = 0.0 if isinstance(block.mlp, MoeConfig) else 2.0 * config.embed_dim * block.mlp.hidden
        if policy == "attention":
            total += attended
        elif (part := compact_share(policy)) is not None:
            total += 4.0 * sum(
                count * inner * compact_matmul.projection_width(part, inner) for inner, count in _inputs(config, block)
            )
        elif (share := offloaded_share(policy)) is not None:
            # The stream after attention waits for all, so what its output is multiplied by is not needed again.
            attention = block.attention
            width = attention.value_dim if isinstance(attention, MLAConfig) else attention.head_dim
            to_stream = 2.0 * config.embed_dim * attention.heads * width
            total += (1 - share) * (_block_products(config, block) - last - to_stream)
        else:
            total += (attended + _block_products(config, block)) * (2 if policy == "sqrt" else 1) - last
    return total


def _inputs(config: DecoderConfig, block: BlockConfig) -> list[tuple[int, int]]:
    """(numbers of a token, products with them) of a dense block's inputs of products."""
    attention, mlp = block.attention, block.mlp
    assert isinstance(attention, AttentionConfig)
    assert isinstance(mlp, MlpConfig)
    up = 2 if mlp.gated else 1
    return [(config.embed_dim, 3 + up), (attention.heads * attention.head_dim, 1), (mlp.hidden, 1)]
