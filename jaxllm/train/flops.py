"""FLOPs of a token and their utilisation (arXiv:2204.02311, appendix B).

    MFU = model FLOPs per token x tokens per second / peak FLOP/s of all devices
    HFU = the same with the FLOPs that the devices really do: those of recomputation count too

A multiply-add is two FLOPs; the backward pass costs twice the forward. What a kernel recomputes inside itself counts in
neither.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxllm.models import DecoderConfig, MoeConfig


def forward_flops_per_token(config: DecoderConfig, attended: Callable[[int | None], float]) -> float:
    """FLOPs of one token's forward pass.

    Matrix multiplications only: two per weight that the token meets (of a mixture, the router's, the chosen experts'
    and the shared one's), embedding look-up free, output head included, and two for each product in the score and the
    value of each token that is attended to (``4 * heads * head_dim``).

    Args:
        attended: how many tokens one attends to on average under a window (None: no window).
    """
    d = config.embed_dim
    total = 2.0 * d * config.vocab_size
    for block in config.blocks:
        a = block.attention
        total += 2.0 * (a.projections(d) + a.attended_dim * attended(a.window))
        if isinstance(block.mlp, MoeConfig):
            widths = block.mlp.top_k * block.mlp.hidden + block.mlp.shared
            total += 2.0 * d * (block.mlp.experts + 3 * widths)
        else:
            total += 2.0 * (3 if block.mlp.gated else 2) * d * block.mlp.hidden
    return total


def causal_mean(seq_len: int, window: int | None) -> float:
    """Tokens attended to on average in a row of ``seq_len``: all before it and itself, the window's length at most."""
    w = min(seq_len, window or seq_len)
    return (w * (w + 1) / 2 + (seq_len - w) * w) / seq_len


def train_flops_per_token(config: DecoderConfig, seq_len: int) -> float:
    """FLOPs of one token in training on causal rows of ``seq_len`` tokens."""
    return 3.0 * forward_flops_per_token(config, lambda window: causal_mean(seq_len, window))


def hardware_flops_per_token(config: DecoderConfig, seq_len: int) -> float:
    """``train_flops_per_token`` and the matrix products that ``config.remat`` does again.

    "none" and "elementwise" keep the results of all. "full" does a block's again, but for the last of a dense one: the
    gradients need what goes into it, not what comes out.
    """
    total = train_flops_per_token(config, seq_len)
    if config.remat != "full":
        return total
    d = config.embed_dim
    again = forward_flops_per_token(config, lambda window: causal_mean(seq_len, window)) - 2.0 * d * config.vocab_size
    last = sum(2.0 * d * block.mlp.hidden for block in config.blocks if not isinstance(block.mlp, MoeConfig))
    return total + again - last
