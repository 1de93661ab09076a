"""Rollout batch: rollouts with rewards become groups with advantages, and these the packed rows of a training step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jaxllm.data import Batch
from jaxllm.data.sequence_packing import pack_documents
from jaxllm.files import DataError
from jaxllm.posttrain.algorithms import Algorithm, overlong_penalty, resample_on_correct, token_weights
from jaxllm.posttrain.gae import TokenPlaces
from jaxllm.posttrain.prompts import blank_batch
from jaxllm.posttrain.rewards import Judgement
from jaxllm.posttrain.rollouts import Rollout


@dataclass(frozen=True)
class Episode:
    """Rollout with its judgement and its advantage; NaN rewards have no part in the loss."""

    rollout: Rollout
    judgement: Judgement
    reward: float
    advantage: float = 0.0


@dataclass(frozen=True)
class Groups:
    """Episodes of a step by prompt.

    Attributes:
        groups: kept episodes of each prompt.
        metrics: means over the step.
    """

    groups: list[list[Episode]]
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def episodes(self) -> list[Episode]:
        """All kept episodes."""
        return [one for group in self.groups for one in group]


def judged_group(
    rollouts: list[Rollout], judgements: list[Judgement], algorithm: Algorithm, keep: int, largest: int, seed: int
) -> list[Episode]:
    """Episodes of one prompt with their rewards: penalties added, and oversampled ones resampled.

    Args:
        keep: number of episodes to keep.
        largest: largest length of a completion.
        seed: RNG seed of what is drawn.
    """
    rewards = np.array([one.reward for one in judgements])
    lengths = np.array([sum(one.is_written) for one in rollouts], np.float64)
    if algorithm.overlong:
        rewards = rewards + overlong_penalty(lengths[None], largest, algorithm.overlong)[0]
    chosen = list(range(len(rollouts)))
    if algorithm.oversample > 1:
        # Flaws are failed tool calls, as a share of all, and that a completion does not end.
        failed = np.array([one.flaws / max(one.calls, 1) for one in rollouts])
        cut = np.array([float(one.finish != "stop") for one in rollouts])
        chosen = resample_on_correct(
            rewards, failed + cut + lengths / (1e3 * largest), keep, np.random.default_rng(seed)
        )
    return [Episode(rollouts[n], judgements[n], float(rewards[n])) for n in chosen]


def is_informative(group: list[Episode]) -> bool:
    """Whether the rewards of a group differ, so that some advantage is not zero."""
    rewards = [one.reward for one in group if np.isfinite(one.reward)]
    return len(rewards) > 1 and max(rewards) > min(rewards)


def with_advantages(groups: list[list[Episode]], algorithm: Algorithm) -> list[list[Episode]]:
    """Groups with the algorithm's advantages; all groups have the same size."""
    rewards = np.array([[one.reward for one in group] for group in groups], np.float64)
    found: Float[np.ndarray, "P G"] = algorithm.advantage(rewards)
    return [
        [replace(one, advantage=float(value)) for one, value in zip(group, row, strict=True)]
        for group, row in zip(groups, found, strict=True)
    ]


class PackedEpisodes(NamedTuple):
    """Packed rows of episodes.

    Attributes:
        batch: the rows.
        episodes: those that have a part in the loss.
        places: of their tokens that the policy wrote.
    """

    batch: Batch
    episodes: list[Episode]
    places: list[TokenPlaces]


def rollout_batch(
    episodes: list[Episode], algorithm: Algorithm, rows: int, seq_len: int, largest: int
) -> PackedEpisodes:
    """Packed rows of episodes: completions are targets, with their advantages, old log-probabilities and weights.

    Of an episode with an environment only what the policy wrote is a target. Episodes without a reward are left out.
    Whole episodes are packed by best fit, so that long and short ones share rows.

    Args:
        rows, seq_len: shape of the batch.
        largest: largest length of a completion, for ``token_weights``.

    Raises:
        DataError: they do not fit.
    """
    batch = blank_batch(rows, seq_len, algorithm.has_values)
    used = [one for one in episodes if np.isfinite(one.reward) and any(one.rollout.is_written)]
    if not used:
        return PackedEpisodes(batch, [], [])
    widths = np.array([len(one.rollout.prompt.ids) + len(one.rollout.tokens) for one in used], np.int64)
    weights = token_weights(
        np.array([sum(one.rollout.is_written) for one in used], np.float64), algorithm.mean_over, largest
    )
    plan = pack_documents(np.cumsum(widths) - widths, widths, seq_len)
    if plan.rows > rows:
        raise DataError(
            f"{len(used)} completions take {plan.rows} rows of {seq_len} tokens; data.batch_size = {rows} is too small"
        )
    starts = {int(start): number for number, start in enumerate(np.cumsum(widths) - widths)}
    assert batch.weights is not None
    assert batch.advantages is not None
    assert batch.old_logprobs is not None
    places: dict[int, TokenPlaces] = {}
    for row in range(plan.rows):
        column = 0
        for segment, piece in enumerate(range(plan.row_offsets[row], plan.row_offsets[row + 1]), 1):
            number = starts[int(plan.piece_start[piece])]
            rollout = used[number].rollout
            ids = np.array([*rollout.prompt.ids, *rollout.tokens], np.int32)
            here = slice(column, column + len(ids) - 1)
            written = np.array(rollout.is_written)
            said = np.arange(here.stop - len(rollout.tokens), here.stop)[written]
            batch.tokens[row, here], batch.segment_ids[row, here] = ids[:-1], segment
            batch.positions[row, here] = np.arange(len(ids) - 1)
            batch.targets[row, said] = np.array(rollout.tokens, np.int32)[written]
            batch.weights[row, said], batch.advantages[row, said] = weights[number], used[number].advantage
            batch.old_logprobs[row, said] = np.array(rollout.logprobs, np.float32)[written]
            places[number] = TokenPlaces(row, said)
            column = here.stop
    return PackedEpisodes(batch, used, [places[number] for number in range(len(used))])


def rows_needed(completions: int, longest: int, seq_len: int) -> int:
    """Rows that so many completions take at most, each with its prompt at most ``longest`` tokens long."""
    each = max(seq_len // max(longest - 1, 1), 1)
    return -(-completions // each)
