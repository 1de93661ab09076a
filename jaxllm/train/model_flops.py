"""Model FLOPs per token, and utilisation of the peak: MFU and HFU (arXiv:2204.02311, appendix B).

    MFU = model FLOPs per token x tokens per second / peak FLOP/s of all devices
    HFU = the same with hardware FLOPs, which include those of recomputation (remat, gradient checkpointing)

A multiply-add is two FLOPs; the backward pass costs twice the forward pass. Recomputation inside a kernel counts in
neither.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from jaxllm.models import (
    BlockConfig,
    DecoderConfig,
    compact_matmul,
)
from jaxllm.models.layers.layer import MatmulValue
from jaxllm.models.remat import (
    ELEMENTWISE,
    VALUES,
    Policy,
    compact_share,
    offloaded_share,
    policies_by_layer,
    saved_values,
)


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

    "none" saves all matmul results, and the others what ``kept_of`` says: the gradients read some values, of which
    those that are not kept are computed again from what is kept. "full" so recomputes a block's matmuls except for the
    last, whose output is read only by a norm. "sqrt" recomputes the whole forward pass once more. "offload" recomputes
    the matmuls of the tokens that are not offloaded to the host, and those of experts (and the router's, which it
    really keeps of its share of the tokens). "compact" adds projections of each matmul's saved input to a narrow space
    and back.
    """
    if policy == "none":
        return 0.0
    total = 0.0
    for block in blocks:
        values = block.matmul_values(config.embed_dim)
        if (part := compact_share(policy)) is not None:
            inputs = (*block.attention.matmul_inputs(config.embed_dim), *block.mlp.matmul_inputs(config.embed_dim))
            total += 4.0 * sum(n * inner * compact_matmul.projection_width(part, inner) for inner, n in inputs)
        elif (share := offloaded_share(policy)) is not None:
            # The residual stream after attention is offloaded for all tokens: the output projection is not recomputed.
            total += (1 - share) * flops_again(block, values, ("attention", "residual"), seq_len)
            total += share * flops_again(block, values, tuple(VALUES), seq_len)
        elif policy == "sqrt":
            # What the second recomputation leaves out, the first one computes: it needs the outputs of blocks.
            last = 2.0 * block.mlp.last_macs(config.embed_dim) * all(one.name != "down" for one in values)
            everything = sum(flops_of_value(block, one, seq_len) for one in values) + last
            total += flops_again(block, values, (), seq_len) + everything
        else:
            total += flops_again(block, values, kept_of(policy), seq_len)
    return total


def kept_of(policy: Policy) -> tuple[str, ...]:
    """Names in ``jaxllm.models.remat.VALUES`` that "full", "attention", "elementwise" and "save" keep."""
    if (kept := saved_values(policy)) is not None:
        return kept
    before = tuple(name for name in ELEMENTWISE if name != "attention")
    return {"full": (), "attention": before, "elementwise": ELEMENTWISE}[policy]


def flops_again(block: BlockConfig, values: Sequence[MatmulValue], kept: Container[str], seq_len: int) -> float:
    """FLOPs of one token that a block's backward pass recomputes if it keeps these of its values."""
    needed = {one.name for one in values if one.read and one.name not in kept}
    total = 0.0
    for one in reversed(values):
        if one.name in needed:
            needed |= {name for name in one.inputs if name not in kept}
            total += flops_of_value(block, one, seq_len)
    return total


def flops_of_value(block: BlockConfig, value: MatmulValue, seq_len: int) -> float:
    """FLOPs of one token that compute a value from its inputs."""
    return 2.0 * (value.macs + value.pair_macs * causal_mean(seq_len, block.attention.window))
