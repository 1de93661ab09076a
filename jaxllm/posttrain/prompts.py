"""Prompts of a run of reinforcement learning: records with a prompt and what the rewards need to judge completions.

``PromptSource`` is the run's training data: it says which records each step takes, in a shuffled, endless order, so
that the data cursor of a checkpoint is the number of steps. Its batches are blank: rollouts fill them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.data import Batch, shuffle
from jaxllm.data.dataset import ResumableDataset, shard_rows, shuffled_rows
from jaxllm.files import DataError, digest
from jaxllm.posttrain.environments.tool_environment import tool_instructions
from jaxllm.posttrain.reasoning_gym_tasks import GYM, gym_prompts
from jaxllm.text import ChatTemplate, Tokenizer

ARITHMETIC = "arithmetic"
ARITHMETIC_PROMPTS = 1000


@dataclass(frozen=True)
class Prompt:
    """Prompt of a run.

    Attributes:
        ids: tokens.
        text: what reward functions are given.
        row: its record.
    """

    ids: tuple[int, ...]
    text: str
    row: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class PromptSource(ResumableDataset):
    """Prompts by step.

    Attributes:
        prompts: all prompts.
        per_step: prompts of a step, and of each further attempt at it.
        attempts: most attempts of a step.
        batch_size, seq_len: shape of the batches.
        seed: of the order.
        identity: JSON values that determine the prompts of every step.
        values: whether batches have values and returns of tokens.
    """

    prompts: tuple[Prompt, ...]
    per_step: int
    attempts: int
    batch_size: int
    seq_len: int
    seed: int
    identity: dict[str, Any]
    values: bool = False

    def prompts_at(self, step: int, attempt: int = 0) -> list[Prompt]:
        """Prompts of a step; further ones for each attempt, which no other step has in the same epoch."""
        first = (step * self.attempts + attempt) * self.per_step
        return [self.prompts[row] for row in shuffled_rows(first, self.per_step, len(self.prompts), self.seed)]

    def batch_at(self, step: int, *, shard: int = 0, num_shards: int = 1) -> Batch:
        """Blank batch with the fields and the shape that rollouts have."""
        begin, end = shard_rows(self.batch_size, shard, num_shards)
        return blank_batch(end - begin, self.seq_len, self.values)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(prompt.ids) for prompt in self.prompts)


def blank_batch(rows: int, seq_len: int, values: bool = False) -> Batch:
    """Batch without a token, with the fields of rollouts, and with values and returns if ``values``."""
    tokens, targets, segments, positions = (np.full((rows, seq_len), fill, np.int32) for fill in (0, -1, 0, 0))
    weights, advantages, old, before, returns = (np.zeros((rows, seq_len), np.float32) for _ in range(5))
    found = Batch(tokens, targets, segments, positions, weights, advantages, old)
    return found._replace(old_values=before, returns=returns) if values else found


def load_prompts(
    name: str, tokenizer: Tokenizer, template: ChatTemplate | None, room: int, tools: Sequence[Mapping[str, Any]] = ()
) -> tuple[tuple[Prompt, ...], str]:
    """Prompts by name, as tokens, and a line about them for a log.

    Args:
        name: see ``PolicyRunConfig.prompts``.
        tokenizer, template: of the model.
        room: most tokens of a prompt.
        tools: JSON schemas of functions that the policy may call; messages are rendered with them.

    Raises:
        DataError: there is no such file, or a record cannot be used; names file and row. A prompt that is too long is
            an error, since it would never be answered.
    """
    kind, _, argument = name.partition(":")
    asks = template is not None
    if kind == ARITHMETIC:
        records = arithmetic(argument or "1", asks=asks)
    else:
        records = gym_prompts(argument, asks=asks) if kind == GYM and argument else read_prompts(Path(name))
    found = []
    for number, record in enumerate(records, 1):
        where = f"{name}:{number}"
        try:
            text, ids = encode_prompt(record["prompt"], tokenizer, template, tools)
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
        if len(ids) > room:
            raise DataError(
                f"{where}: the prompt has {len(ids)} tokens; data.seq_len less rollout.max_tokens leaves {room}. Leave "
                "it out, or give longer rows"
            )
        found.append(Prompt(ids, text, record))
    if not found:
        raise DataError(f"{name}: contains no prompts")
    return tuple(found), f"{name}: {len(found):,} prompts of up to {max(len(one.ids) for one in found)} tokens"


def encode_prompt(
    prompt: str | list[dict[str, Any]],
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> tuple[str, tuple[int, ...]]:
    """(text, tokens) of a prompt: messages through the chat template, a text as ``LLM`` encodes it.

    Where the template leaves tools out, a system message describes them.

    Raises:
        DataError: messages without a template, or an empty prompt.
    """
    if isinstance(prompt, str):
        text, ids = prompt, tokenizer.encode(prompt, bos=tokenizer.adds_bos, specials=True)
    elif template is None:
        raise DataError("the prompt is a list of messages, but the model has no chat template; give a text")
    else:
        text, ids = template.encode(tokenizer, prompt, list(tools) or None)
        if tools and text == template.render(prompt, None):
            described = {"role": "system", "content": tool_instructions(tools)}
            text, ids = template.encode(tokenizer, [described, *prompt])
    if len(ids) == 0:
        raise DataError("the prompt is empty")
    return text, tuple(int(i) for i in ids)


def read_prompts(file: Path) -> list[dict[str, Any]]:
    """Records of a JSONL file, each with a ``prompt``. Raises DataError naming file and row."""
    if not file.is_file():
        raise DataError(f"{file}: there is no such file; prompts is arithmetic:DIGITS, gym:TASK or a JSONL file")
    found = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"{file}:{number}: not valid JSON ({error})") from None
        if not isinstance(record, dict) or not isinstance(record.get("prompt"), (str, list)):
            raise DataError(f"{file}:{number}: a record is an object with 'prompt', a text or a list of messages")
        found.append(record)
    return found


def arithmetic(digits: str, *, asks: bool = False) -> list[dict[str, Any]]:
    """Sums of two numbers with so many digits, each with its ``answer``: all pairs of one digit, else a fixed draw.

    Args:
        digits: of each number at most.
        asks: prompts are messages that ask for the sum, for a model with a chat template.

    Raises:
        DataError: ``digits`` is no number from 1 to 6.
    """
    if not (digits.isdecimal() and 1 <= int(digits) <= 6):
        raise DataError(f"arithmetic:{digits}: give 1 to 6 digits, such as arithmetic:2")
    top = 10 ** int(digits)
    if top == 10:
        pairs = [(a, b) for a in range(10) for b in range(10)]
    else:
        pairs = np.random.default_rng(0).integers(0, top, (ARITHMETIC_PROMPTS, 2)).tolist()
    return [{"prompt": _question(a, b) if asks else f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]


def _question(a: int, b: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"What is {a} + {b}? Answer with the number only."}]


def prompt_source(
    prompts: tuple[Prompt, ...],
    *,
    per_step: int,
    attempts: int,
    batch_size: int,
    seq_len: int,
    seed: int,
    fields: Any,
    values: bool = False,
) -> PromptSource:
    """Source of prompts, whose identity has their contents and ``fields``."""
    identity = {
        "prompts": digest([[list(one.ids), dict(one.row)] for one in prompts]),
        "per_step": per_step,
        "attempts": attempts,
        "batch_size": batch_size,
        "seq_len": seq_len,
        "seed": seed,
        "order": shuffle.NAME,
        **fields,
    }
    return PromptSource(prompts, per_step, attempts, batch_size, seq_len, seed, identity, values)
