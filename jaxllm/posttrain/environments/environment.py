"""Environment protocol: multi-turn episodes of reinforcement learning, one turn of the policy after the other.

An episode begins with a prompt. The policy writes a turn, the environment reads it and answers with an observation that
the policy reads before its next turn, until the environment says that the episode is done. Only what the policy wrote
has a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class Observation:
    """Answer of an environment to a turn.

    Attributes:
        text: what the policy reads before its next turn; never parsed for special tokens.
        done: the episode ends with this turn; ``text`` is not read.
        reward: added to the episode's reward.
        calls, flaws: tool calls of the turn, and how many of them failed; GRPO-RoC prefers successes with few flaws.
    """

    text: str = ""
    done: bool = False
    reward: float = 0.0
    calls: int = 0
    flaws: int = 0


@runtime_checkable
class Environment(Protocol):
    """Environment of one episode.

    Attributes:
        tools: JSON schemas of the functions that the policy may call, as chat templates take them; empty: none.
        role: role of observations in a conversation: ``tool``, or ``user``.
        stop: strings that end a turn besides the model's own end of turn.
    """

    tools: tuple[dict[str, Any], ...]
    role: str
    stop: tuple[str, ...]

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        """Begins the episode of a prompt.

        Args:
            row: the prompt's record.
            seed: RNG seed of the episode; the same seed and turns give the same episode.
        """
        ...

    def step(self, action: str) -> Observation:
        """Reads a turn of the policy, as text with its special tokens but the one that ended it."""
        ...


EnvironmentFactory = Callable[[], Environment]
"""Creates the environment of one episode."""
