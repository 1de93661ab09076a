"""How long the sequences of a model may become, and what it may be split over."""

from __future__ import annotations

import jax

from jaxllm.models import DecoderConfig, DynamicScaling, LongRopeScaling
from sharding import ShardingError

UNKNOWN_LENGTH = 2048
"""Tokens of a sequence where neither the model nor the engine's configuration says how many."""


def settle_length(config: DecoderConfig, asked: int | None, longest: int | None) -> int:
    """Tokens of the longest sequence: what is asked for, else what the model was trained to read.

    Raises:
        ValueError: more than the model can do.
    """
    most, why = hard_limit(config)
    if asked is not None and most is not None and asked > most:
        raise ValueError(f"engine: max_len = {asked}, but {why} {most} tokens.")
    return asked or min(n for n in (most, longest or UNKNOWN_LENGTH) if n is not None)


def hard_limit(config: DecoderConfig) -> tuple[int | None, str]:
    """(tokens of a sequence that the model can be served with, why no more); None where any number will do."""
    limits = [(config.learned_positions, "the model has learned positions for")]
    for block in config.blocks:
        scaling = None if block.attention.rope is None else block.attention.rope.scaling
        if isinstance(scaling, (DynamicScaling, LongRopeScaling)):
            what = f"{type(scaling).__name__} turns what is cached by other angles beyond"
            limits.append((scaling.original_length, what))
    known = [(most, what) for most, what in limits if most is not None]
    return min(known, default=(None, ""))


def check_mesh(mesh: jax.sharding.Mesh | None) -> None:
    """Refuses meshes that an engine cannot split a model over.

    Raises:
        ShardingError: names the axes.
    """
    wrong = [] if mesh is None else [name for name, size in mesh.shape.items() if size > 1 and name != "tensor"]
    if wrong:
        raise ShardingError(
            f"an engine splits a model over tensor alone, and this mesh has {', '.join(wrong)}: load the model "
            "on a mesh of tensor, and start an engine for each part of the devices."
        )
