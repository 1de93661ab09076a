"""Bytes of a block's named values on a device, and what each streamed layer saves of a micro-batch, by formula.

The names are those of ``jaxllm.models.remat.VALUES``, with the widths of ``BlockConfig.matmul_values``.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from jaxllm.models import BlockConfig
from jaxllm.models.remat import VALUES, policies_by_segment
from jaxllm.plan.formulas.device_work import DeviceWork
from jaxllm.train.model_flops import kept_of

OF_STREAM = ("residual", "o_proj", "down")
"""Values that are split as the residual stream is."""
WHOLE = ("q_latent", "kv_latent")
"""Values that every shard of heads has."""
INNER = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "attention": "out"}
"""Inner activation (``DeviceWork.inner_widths``) that a value of another name is as wide as."""


OF_ATTENTION = ("q", "k", "v", "attention")
"""Values that attention names, which ring attention does not."""


def value_bytes(work: DeviceWork, block: BlockConfig) -> dict[str, float]:
    """Bytes of a micro-batch's named values of a block on a device, by name."""
    inner, found = work.inner_widths(block), dict[str, float]()
    ring = dict(work.mesh.axes).get("context", 1) > 1
    sums = max(4, work.width) * work.tokens * block.attention.heads / work.tensor  # logsumexp
    for one in block.matmul_values(work.run.model.embed_dim):
        if one.name not in VALUES or (ring and one.name in OF_ATTENTION):
            continue
        if one.name in OF_STREAM:
            size = float(work.stream_bytes())
        else:
            split = one.width / (1 if one.name in WHOLE else work.tensor)
            size = inner.get(INNER.get(one.name, one.name), split) * work.tokens * work.width
        found[one.name] = found.get(one.name, 0.0) + size + sums * (one.name == "attention")
    return {name: size for name, size in found.items() if size}


def saved_of_block(work: DeviceWork, block: BlockConfig, kept: Container[str]) -> float:
    """Bytes of the values that a block saves if its policy keeps these names: those that its backward pass reads, and
    those that it computes others from."""
    sizes, values = value_bytes(work, block), block.matmul_values(work.run.model.embed_dim)
    there = {name for name in sizes if name in kept}
    needed = {one.name for one in values if one.read}
    for one in reversed(values):
        if one.name in needed - there:
            needed |= set(one.inputs)
    return sum(sizes[name] for name in there & needed)


def saved_by_unit(work: DeviceWork, remat: str) -> list[int]:
    """Bytes that each unit of streamed layers saves of a micro-batch on a device: its input and named values.

    Args:
        work: of the run; its own remat does not count.
        remat: policies that save named values alone (``jaxllm.models.remat.saves_names_alone``).
    """
    segments, found = work.run.model.segments, list[int]()
    for (group, _), pieces in zip(segments, policies_by_segment(remat, segments), strict=True):
        for policy, repeats in pieces:
            found += [saved_of_group(work, group, kept_of(policy))] * repeats
    return found


def saved_of_group(work: DeviceWork, group: Sequence[BlockConfig], kept: Container[str]) -> int:
    """Bytes that one repeat of a group of blocks saves of a micro-batch on a device, its input too."""
    return round(work.stream_bytes() + sum(saved_of_block(work, block, kept) for block in group))
