"""Environments of tests: one that echoes, ones that fail, and tools."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from jaxllm.posttrain.environments.environment import Observation


class Echo:
    """Answers each turn with its length; ends after so many turns as the row says; rewards ASCII."""

    tools: tuple[dict[str, Any], ...] = ()
    role = "user"
    stop: tuple[str, ...] = ()
    turns = 2

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        """Begins with no turn."""
        self.left = int(row.get("turns", self.turns))

    def step(self, action: str) -> Observation:
        """A mark, and the share of ASCII characters as the reward."""
        self.left -= 1
        reward = sum(ord(x) < 128 for x in action) / max(len(action), 1)
        return Observation(f"<{len(action)}>", done=not self.left, reward=reward, calls=1, flaws=int(len(action) < 3))


class Short(Echo):
    """Turns of at most a space."""

    stop = (" ",)


class Raises(Echo):
    """Fails where it says anything."""

    def step(self, action: str) -> Observation:
        """Fails."""
        raise KeyError("no such state")


class Slow(Echo):
    """Takes longer than it may."""

    def step(self, action: str) -> Observation:
        """Waits."""
        time.sleep(1.0)
        return super().step(action)


class Wrong(Echo):
    """Gives no observation."""

    def step(self, action: str) -> Any:
        """A text."""
        return "text"


def add(first: int, second: int = 1) -> int:
    """Sum of two numbers.

    Nothing else.
    """
    return first + second


def fails(text: str) -> str:
    """Always fails."""
    raise LookupError(text)


def unannotated(value) -> str:  # type: ignore[no-untyped-def]
    """A tool without a type."""
    return str(value)
