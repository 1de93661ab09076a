"""Sequence length limits of a model."""

from __future__ import annotations

from jaxllm.config import ConfigError
from jaxllm.models import DecoderConfig, DynamicScaling, LongRopeScaling

UNKNOWN_LENGTH = 2048
"""Maximum sequence length if neither the model nor the engine's configuration has one."""


def choose_max_len(config: DecoderConfig, requested: int | None, longest: int | None) -> int:
    """Maximum sequence length in tokens: the requested one, else the length that the model was trained on.

    Raises:
        ValueError: more tokens than the model supports.
    """
    most, why = hard_limit(config)
    if requested is not None and most is not None and requested > most:
        raise ConfigError(f"engine: max_len = {requested}, but {why} {most} tokens.")
    return requested or min(n for n in (most, longest or UNKNOWN_LENGTH) if n is not None)


def hard_limit(config: DecoderConfig) -> tuple[int | None, str]:
    """(maximum tokens of a sequence that the model supports, reason); None if there is no limit."""
    limits = [(config.learned_positions, "the model has learned positions for")]
    for block in config.blocks:
        scaling = None if block.attention.rope is None else block.attention.rope.scaling
        if isinstance(scaling, (DynamicScaling, LongRopeScaling)):
            what = f"{type(scaling).__name__} changes the rotary angles of cached keys beyond"
            limits.append((scaling.original_length, what))
    known = [(most, what) for most, what in limits if most is not None]
    return min(known, default=(None, ""))


def check_branches(config: DecoderConfig, tokens: int) -> None:
    """Checks that a branch of so many draft tokens is within the model's sliding windows, as the tree mask needs.

    Raises:
        ValueError: names the window.
    """
    windows = [block.attention.window for block in config.blocks if block.attention.window is not None]
    if min(windows, default=tokens + 1) <= tokens:
        raise ValueError(
            f"speculate: the model has a sliding window of {min(windows)} tokens, and a branch of a draft tree may "
            f"have {tokens}; give a smaller tree, or draft:MODEL."
        )
