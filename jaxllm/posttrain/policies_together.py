"""Policies together: reinforcement learning of several policies that are adapters of one base, at the same time.

    step n   swap all adapters into the engine -> rollouts of all policies in shared steps of the engine -> rewards,
             advantages and packed rows of each -> one joint update (``jaxllm.train.together``)

The base stays on the devices, and on one device the engine samples with the arrays that the step reads: a swap moves
adapters alone. Each run's
directory is what training its policy alone gives.

Source: MinT (arXiv:2605.13779): concurrent multi-policy GRPO, adapters handed over instead of merged checkpoints.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jaxllm.config import ConfigError
from jaxllm.models.param_subset import merge
from jaxllm.peft.adapted_model import adapter_of, base_params
from jaxllm.posttrain.algorithms import find_algorithm
from jaxllm.posttrain.episode_log import EpisodeLog
from jaxllm.posttrain.policy_config import PolicyRunConfig
from jaxllm.posttrain.policy_training import RolloutFeed, StepRollouts, open_policy_data, timeline_of, with_algorithm
from jaxllm.posttrain.prompts import blank_batch
from jaxllm.posttrain.rewards import RewardError
from jaxllm.posttrain.rollout_queue import QueuedBatch, RolloutQueue
from jaxllm.posttrain.rollouts import RolloutEngine, Sampling, rollout_mesh
from jaxllm.train.loop import TrainResult
from jaxllm.train.run import Run
from jaxllm.train.run_model import base_model
from jaxllm.train.together.runs_file import check_alike
from jaxllm.train.together.together_loop import train_together

SERVED = ("lora", "rslora", "qlora")
"""Adapters that the engine serves beside each other."""


def train_policies_together(configs: Sequence[PolicyRunConfig]) -> tuple[TrainResult, ...]:
    """Trains several policies, each an adapter of one base, or resumes their runs.

    Args:
        configs: the runs, which differ in ``runs_file.may_differ`` alone.

    Returns:
        the result of each; ``complete`` is False for one that stopped.

    Raises:
        RewardError: most completions of a policy's step have no reward; the message names the run. All runs resume
            from their last checkpoints.
        ConfigError: the policies are no adapters that an engine serves side by side, or as for ``train_together``.
    """
    for config in configs:
        if find_algorithm(config.algorithm).has_values:
            raise ConfigError(
                f'{config.name}: algorithm = "{config.algorithm}" has a value head, which is trained for one run at a '
                "time; the engine's policies are adapters alone. Choose another algorithm, or train one policy after "
                "the other."
            )
        if config.rollout.updates > 1:
            raise ConfigError(
                f"{config.name}: rollout.updates = {config.rollout.updates}: several policies are updated once with "
                "each batch, whose rollouts they sample together. Give 1, or train one policy after the other."
            )
    configs = [with_algorithm(config) for config in configs]
    check_alike(configs)
    first = configs[0]
    if first.adapter.kind not in SERVED or first.trainable:
        what = f"trainable = {first.trainable}" if first.trainable else f'adapter.kind = "{first.adapter.kind}"'
        raise ConfigError(
            f"{first.name} and other policies are sampled by one engine, which does not serve {what} beside others. "
            f"Choose adapter.kind from {', '.join(SERVED)}, without trainable, or train one policy after the other."
        )
    feeds = [RolloutFeed(config, open_policy_data(config)) for config in configs]
    return train_together(configs, data=[feed.dataset for feed in feeds], feed=RolloutsTogether(feeds))


class RolloutsTogether:
    """Batches of rollouts of several policies, sampled by one engine (``together_loop.JointFeed``).

    Args:
        feeds: of the policies, by themselves.
    """

    def __init__(self, feeds: Sequence[RolloutFeed]):
        self._feeds = feeds
        self.engine: RolloutEngine | None = None

    @contextlib.contextmanager
    def batches(
        self, runs: Sequence[Run], base: Any, first: int, params: Callable[[], Sequence[Any]]
    ) -> Iterator[Sequence[Iterator[tuple[int, Any]]]]:
        """Context manager with an iterator over (step, batch on the devices) for each policy."""
        config, mesh, names = self._feeds[0].config, runs[0].mesh, [run.config.name for run in runs]
        own = next(own for own in params() if own is not None)
        self.engine = engine = RolloutEngine(
            base_model(config),
            base_params(merge(own, base)),  # arrays of the base, which no step donates
            self._feeds[0].tokenizer,
            rollout_mesh(config.rollout.mesh, mesh),
            max(feed.longest for feed in self._feeds),
            config.rollout.max_sequences,
            batched_tokens=config.rollout.max_batched_tokens,
            adapters=len(runs),
            rank=config.adapter.rank
            * (2 if config.adapter.kind == "lora_ga" else 1),  # what it starts from, subtracted
        )
        logs = [feed.log_of(run, first) for feed, run in zip(self._feeds, runs, strict=True)]
        going: list[str] = []

        def swap(step: int) -> None:
            found = {name: own for name, own in zip(names, params(), strict=True) if own is not None}
            going[:] = found
            adapters = {name: adapter_of(config.adapter, jax.device_get(own)) for name, own in found.items()}
            engine.swap_adapters(adapters, step + 1)

        def sample(step: int) -> dict[str | None, StepRollouts]:
            feeds = zip(names, self._feeds, strict=True)
            return engine.run_together(
                {name: named(name, feed.rollouts(step)) for name, feed in feeds if name in going}
            )

        def updated() -> None:
            jax.block_until_ready(params())

        with RolloutQueue(swap, sample, config.rollout.max_staleness, config.steps, updated) as queue:
            together = itertools.tee(((step, queue.next(step)) for step in itertools.count(first)), len(runs))
            yield [self._each(n, *own) for n, own in enumerate(zip(runs, logs, together, strict=True))]

    def _each(
        self, number: int, run: Run, log: EpisodeLog, together: Iterator[tuple[int, QueuedBatch]]
    ) -> Iterator[tuple[int, Any]]:
        """Batches of one policy; blank ones once it has stopped."""
        feed, name, timeline = self._feeds[number], run.config.name, timeline_of(run)
        for step, queued in together:
            own = queued.batch.get(name)
            data = run.config.data
            blank = blank_batch(data.batch_size, data.seq_len)
            batch = blank if own is None else feed.logged(step, own, queued, log, timeline)
            yield step, run.put_batch(batch)

    def metrics(self, number: int, step: int) -> dict[str, float]:
        """Metrics of the rollouts of step ``step``, counted from 1, of one policy; given out once."""
        return self._feeds[number].metrics(step)


def named(name: str, sampling: Sampling[StepRollouts]) -> Sampling[StepRollouts]:
    """Sampling whose errors name the run."""
    try:
        return (yield from sampling)
    except RewardError as error:
        raise RewardError(f"{name}: {error}") from error
