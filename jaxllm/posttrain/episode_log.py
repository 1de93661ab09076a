"""Episode log of a run, ``episodes.jsonl``: prompts, completions, rewards and advantages, a line for each rollout."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from jaxllm.files import read_rows
from jaxllm.posttrain.rollout_batch import Episode

EPISODES = "episodes.jsonl"


class EpisodeLog:
    """Appends the episodes of each step; a resumed run writes those after its checkpoint again.

    Args:
        file: of the run; None writes nothing.
        first: steps done before this start; rows of later steps are dropped.
        limit: episodes of each step that are written; 0: all.
    """

    def __init__(self, file: Path | None, first: int, limit: int):
        self._file, self._limit = file, limit
        if file is not None and file.exists():
            kept = [row for row in read_rows(file) if row["step"] <= first]
            temporary = file.with_name(f".{file.name}.{os.getpid()}")
            temporary.write_text("".join(json.dumps(row) + "\n" for row in kept))
            temporary.replace(file)

    def write(self, step: int, groups: list[list[Episode]]) -> None:
        """Writes the episodes of a step, those of a prompt one after the other."""
        if self._file is None:
            return
        rows = [_row(step, number, one) for number, group in enumerate(groups) for one in group]
        with self._file.open("a") as out:
            out.writelines(json.dumps(row) + "\n" for row in rows[: self._limit or None])


def _row(step: int, group: int, one: Episode) -> dict[str, Any]:
    rollout = one.rollout
    found = {
        "step": step,
        "group": group,
        "prompt": rollout.prompt.text,
        "completion": rollout.text,
        "tokens": len(rollout.tokens),
        "finish": rollout.finish,
        "reward": one.reward if math.isfinite(one.reward) else None,
        "terms": one.judgement.terms,
        "advantage": one.advantage,
        "versions": sorted(set(rollout.versions)),
    }
    if rollout.environment_reward is not None:
        found |= {"turns": rollout.turns, "tool_calls": rollout.calls, "failed_tool_calls": rollout.flaws}
        found["written_tokens"] = sum(rollout.is_written)
    return found | ({"failure": one.judgement.failure} if one.judgement.failure else {})
