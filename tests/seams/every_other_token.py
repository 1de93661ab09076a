"""A retention rule that drops every other token of the KV cache: those at odd positions, once they have been read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxllm.infer.runner.paged_cache import RETENTION_RULES


@dataclass(frozen=True)
class EveryOtherToken:
    """A query finds its own token and the tokens at even positions."""

    def keep(self, entries: Any, query: Any) -> Any:
        return (entries % 2 == 0) | (entries >= query)

    def capacity(self, length: int) -> int:
        return (length + 1) // 2


RETENTION_RULES["every_other_token"] = EveryOtherToken()
