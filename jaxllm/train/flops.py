"""FLOPs of a token and their utilisation (arXiv:2204.02311, appendix B).

    MFU = model FLOPs per token x tokens per second / peak FLOP/s of all devices
    HFU = the same with the FLOPs that the devices really do: those of recomputation count too

A multiply-add is two FLOPs; the backward pass costs twice the forward. What a kernel recomputes inside itself counts in
neither.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxllm.models import BlockConfig, DecoderConfig, MoeConfig
from jaxllm.models.remat import by_layer


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
        total += _block_products(config, block) + 2.0 * a.attended_dim * attended(a.window)
    return total


def _block_products(config: DecoderConfig, block: BlockConfig) -> float:
    """FLOPs of a token's products with a block's weights."""
    d = config.embed_dim
    total = 2.0 * block.attention.projections(d)
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
    """``train_flops_per_token`` and the matrix products that ``config.remat`` does again, layer by layer.

    "none" and "elementwise" keep the results of all, "attention" those with weights. "full" does a block's again, but
    for the last of a dense one: the gradients need what goes into it, not what comes out. "sqrt" has done the whole
    forward pass again before that.
    """
    total = train_flops_per_token(config, seq_len)
    for name, block in zip(by_layer(config.remat, config.segments), config.blocks, strict=True):
        if name in ("none", "elementwise"):
            continue
        attended = 2.0 * block.attention.attended_dim * causal_mean(seq_len, block.attention.window)
        if name == "attention":
            total += attended
            continue
        whole = attended + _block_products(config, block)
        last = 0.0 if isinstance(block.mlp, MoeConfig) else 2.0 * config.embed_dim * block.mlp.hidden
        total += whole * (2 if name == "sqrt" else 1) - last
    return total
