"""Model FLOPs per token, and utilisation of the peak: MFU and HFU (arXiv:2204.02311, appendix B).

    MFU = model FLOPs per token x tokens per second / peak FLOP/s of all devices
    HFU = the same with hardware FLOPs, which include those of recomputation (remat, gradient checkpointing)

A multiply-add is two FLOPs; the backward pass costs twice the forward pass. Recomputation inside a kernel counts in
neither.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxllm.models import (
    BlockConfig,
    DecoderConfig,
    compact_matmul,
)
from jaxllm.models.remat import Policy, compact_share, offloaded_share, policies_by_layer, saved_values


def forward_flops_per_token(config: DecoderConfig, attended: Callable[[int | None], float]) -> float:
    """FLOPs of one token's forward pass.

    Matmuls only: two per weight that the token meets (of a mixture of experts: the router's, the chosen experts' and
    the shared expert's), nothing for the embedding look-up, output head included, and two for each multiply-add in the
    score and the value of each attended token (``4 * heads * head_dim``).

    Args:
        attended: window (None: no window) -> number of tokens that one attends to, on average.
    """
    total = 2.0 * config.embed_dim * config.vocab_size
    for block in config.blocks:
        a = block.attention
        total += _block_matmul_flops(config, block) + 2.0 * a.attention_macs * attended(a.window)
    return total


def _block_matmul_flops(config: DecoderConfig, block: BlockConfig) -> float:
    """FLOPs of one token's matmuls with a block's weights."""
    return 2.0 * (block.attention.weight_macs(config.embed_dim) + block.mlp.weight_macs(config.embed_dim))


def causal_mean(seq_len: int, window: int | None) -> float:
    """Average number of tokens attended to in a causal row of ``seq_len``, itself included; at most ``window``."""
    w = min(seq_len, window or seq_len)
    return (w * (w + 1) / 2 + (seq_len - w) * w) / seq_len


def train_flops_per_token(config: DecoderConfig, seq_len: int) -> float:
    """FLOPs of one token's forward and backward pass on causal rows of ``seq_len`` tokens."""
    return 3.0 * forward_flops_per_token(config, lambda window: causal_mean(seq_len, window))


def hardware_flops_per_token(config: DecoderConfig, seq_len: int) -> float:
    """``train_flops_per_token`` plus the matmuls that ``config.remat`` recomputes, layer by layer."""
    policies = zip(policies_by_layer(config.remat, config.segments), config.blocks, strict=True)
    again = sum(recomputed_flops(name, config, (block,), seq_len) for name, block in policies)
    return train_flops_per_token(config, seq_len) + again


def recomputed_flops(policy: Policy, config: DecoderConfig, blocks: Sequence[BlockConfig], seq_len: int) -> float:
    """FLOPs of one token's matmuls that blocks recompute under a policy of ``model.remat``.

    "none" saves all matmul results, "elementwise" all but those of routed experts and their router, "attention" those
    of matmuls with weights alone. "full" recomputes a block's matmuls except for the last: the gradients need its
    input, not its output. "sqrt" recomputes the whole forward pass once more. "save" recomputes what it does not keep.
    "offload" recomputes the matmuls of the tokens that are not offloaded to the host, except for the last, and those of
    experts (and the router's, which it really keeps of its share of the tokens). "compact" adds projections of each
    matmul's saved input to a narrow space and back.
    """
    if policy == "none":
        return 0.0
    total = 0.0
    for block in blocks:
        values, unnamed = value_flops(config, block, seq_len), 2.0 * block.mlp.unnamed_macs(config.embed_dim)
        again = sum(values.values()) + unnamed
        if (part := compact_share(policy)) is not None:
            inputs = (*block.attention.matmul_inputs(config.embed_dim), *block.mlp.matmul_inputs(config.embed_dim))
            total += 4.0 * sum(n * inner * compact_matmul.projection_width(part, inner) for inner, n in inputs)
        elif policy == "elementwise":
            total += unnamed
        elif policy == "attention":
            total += values["attention"] + unnamed
        elif (kept := saved_values(policy)) is not None:
            total += again - sum(values[value] for value in kept)
        elif (share := offloaded_share(policy)) is not None:
            # The residual stream after attention is offloaded for all tokens: the output projection is not recomputed.
            total += unnamed + (1 - share) * (values["qkv"] + values["inner"])
        elif policy == "sqrt":
            total += 2 * again + 2.0 * block.mlp.last_macs(config.embed_dim)
        else:
            total += again
    return total


def value_flops(config: DecoderConfig, block: BlockConfig, seq_len: int) -> dict[str, float]:
    """FLOPs of one token that compute each of ``jaxllm.models.remat.VALUES`` from those before it.

    A block's gradient needs them all, so that each is computed once more if it is not kept.
    """
    layer, mlp = block.attention, block.mlp
    to_stream = 2.0 * config.embed_dim * layer.heads * layer.value_dim
    return {
        "qkv": 2.0 * layer.weight_macs(config.embed_dim) - to_stream,
        "attention": 2.0 * layer.attention_macs * causal_mean(seq_len, layer.window),
        "residual": to_stream,
        "inner": 2.0 * (mlp.weight_macs(config.embed_dim) - mlp.last_macs(config.embed_dim))
        - 2.0 * mlp.unnamed_macs(config.embed_dim),
    }
