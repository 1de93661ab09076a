"""Text scorers: what an embedding model and a reward model say about texts and about pairs of texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from jaxllm.data.chat_encoding import ChatEncoder
from jaxllm.files import DataError
from jaxllm.infer.llm import encode_prompt
from jaxllm.text import ChatTemplate, Tokenizer

TextCache = dict[str, np.ndarray]
"""Vectors of texts that one request has embedded already."""


@dataclass(frozen=True)
class Scored:
    """Result of a scorer: the values, and the number of tokens that were read for them."""

    values: np.ndarray
    tokens: int


@dataclass(frozen=True)
class EmbeddingScorer:
    """Scorer of an embedding model: a text is its embedding, and a pair's score is the cosine of its two.

    Attributes:
        tokenizer: tokenizer of the model.
        embed: (token ids) -> embedding of norm 1, float32 [D]; blocks.
        max_len: maximum length of a text in tokens.
    """

    tokenizer: Tokenizer
    embed: Callable[[Sequence[int]], np.ndarray]
    max_len: int
    kind: Literal["embedding"] = "embedding"

    def text(self, ids: Sequence[int]) -> Scored:
        """Embedding of a text's token ids."""
        return Scored(self.embed(ids), len(ids))

    def pair(self, first: str, second: str, known: TextCache) -> Scored:
        """Cosine of two texts, [1]; ``known`` has the embeddings of the request's texts so far.

        Raises:
            DataError: a text is empty, too long, or the vocabulary cannot spell it.
        """
        vectors, tokens = [], 0
        for text in (first, second):
            if text not in known:
                ids = checked(encode_prompt(self.tokenizer, text), self.max_len)
                known[text], tokens = self.embed(ids), tokens + len(ids)
            vectors.append(known[text])
        return Scored(np.array([vectors[0] @ vectors[1]]), tokens)


@dataclass(frozen=True)
class RewardScorer:
    """Scorer of a reward model (``objective.name = "reward_model"``): the reward of a completion of a prompt.

    Attributes:
        tokenizer, template: those of the model.
        reward: (token ids) -> reward at the last of them; blocks.
        max_len: maximum length of prompt and completion in tokens.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    reward: Callable[[Sequence[int]], float]
    max_len: int
    kind: Literal["reward"] = "reward"
    _none: TextCache = field(default_factory=dict, repr=False)

    def text(self, ids: Sequence[int]) -> Scored:
        """Reward at the last token of a text, [1]."""
        return Scored(np.array([self.reward(ids)], np.float32), len(ids))

    def pair(self, first: str, second: str, known: TextCache) -> Scored:
        """Reward of the second text as the answer to the first, as a probability, [1].

        The conversation is rendered as in training; the reward is that at the token before the answer's end.

        Raises:
            DataError: it is too long, or the template or the vocabulary cannot write it.
        """
        ids = checked(self._pair_ids(first, second), self.max_len)
        return Scored(sigmoid(self.text(ids).values), len(ids))

    def _pair_ids(self, first: str, second: str) -> list[int]:
        if self.template is None:
            return [*encode_prompt(self.tokenizer, first), *self.tokenizer.encode(second)]
        encoder = ChatEncoder(self.tokenizer, self.template)
        prompt, answer = ({"role": role, "content": text} for role, text in (("user", first), ("assistant", second)))
        whole = encoder.encode_answer([prompt], [answer])
        assert whole.loss_mask is not None
        return [int(i) for i in whole.ids[: int(np.flatnonzero(whole.loss_mask)[-1])]]


TextScorer = EmbeddingScorer | RewardScorer


def sigmoid(values: np.ndarray) -> np.ndarray:
    """Logistic function."""
    return np.array([1 / (1 + math.exp(-v)) if v >= 0 else math.exp(v) / (1 + math.exp(v)) for v in values.tolist()])


def checked(ids: list[int], most: int) -> list[int]:
    """Token ids of a text that a scorer can read.

    Raises:
        DataError: there are none, or too many.
    """
    if not ids or len(ids) > most:
        raise DataError(f"a text has {len(ids):,} tokens; 1 to {most:,} are legal.")
    return ids


def reward_token_of(meta: Mapping[str, Any]) -> int | None:
    """Token whose logit is the reward, of a checkpoint's metadata; None where it is no reward model."""
    objective = meta.get("config", {}).get("objective", {})
    if objective.get("name") != "reward_model":
        return None
    values = dict(option.partition("=")[::2] for option in objective.get("options", ()))
    return int(values.get("reward_token", 0))
