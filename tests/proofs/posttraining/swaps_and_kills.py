"""Runs of many steps: swaps of weights compile nothing, and asynchronous runs survive kills at any moment."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxllm.checkpoint import CheckpointConfig
from jaxllm.peft.adapter_method import AdapterConfig
from jaxllm.posttrain import train_policy
from jaxllm.posttrain.policy_training import RolloutFeed, open_policy_data, with_algorithm
from jaxllm.train import Run
from jaxllm.train import loop as training_loop
from tests.posttrain.killed_policy import survives_kills
from tests.posttrain.tiny_policy import policy_run
from tests.proofs.harness import proof
from tests.train.test_step import compilations

STEPS = 200
READY = 3
"""Steps after which every program has run once, that of a save included."""


class WatchedFeed(RolloutFeed):
    """Feed that records the version of the weights at each swap, and what is compiled from step ``READY`` on."""

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.versions: list[int] = []
        self.compiled: list[str] = []

    def batches(self, run: Run, first: int, params: Any) -> Any:
        @contextlib.contextmanager
        def watched() -> Iterator[Any]:
            with contextlib.ExitStack() as stack:
                given = stack.enter_context(RolloutFeed.batches(self, run, first, params))

                def each() -> Iterator[tuple[int, Any]]:
                    for step, batch in given:
                        assert self.engine is not None
                        self.versions.append(self.engine.engine.version)
                        assert self.engine.engine.runner.program_cache.counts.late == 0  # type: ignore[attr-defined]
                        if step == READY:
                            self.compiled = stack.enter_context(compilations())
                        yield step, batch

                yield each()

        return watched()


@proof("posttraining", cases=["grpo", "ppo", "adapter", "asynchronous"], sample=1)
def swaps_compile_nothing(case: str) -> None:
    """A run of 200 steps with a swap each, and a save after every second: programs that the process asks for."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fields: dict[str, Any] = {"steps": STEPS, "group": 2, "checkpoint": CheckpointConfig(every=2, keep_last=1)}
        if case == "adapter":
            base = train_policy(policy_run(folder, name="base", steps=1)).directory
            adapter = AdapterConfig("lora", rank=4, targets=("attention", "mlp"))
            fields |= {"init_from": str(base), "adapter": adapter}
        fields |= {"algorithm": "ppo"} if case == "ppo" else {}
        fields |= {"max_staleness": 2} if case == "asynchronous" else {}
        config = with_algorithm(policy_run(folder, **fields))
        feed = WatchedFeed(config, open_policy_data(config))
        training_loop.train(config, data=feed.dataset, feed=feed)
    assert feed.versions == list(range(1, STEPS + 1)), "each step had a swap"
    assert feed.compiled == []


@proof("posttraining", count=25, sample=1)
def asynchronous_runs_survive_kills(seed: int) -> None:
    """Four SIGKILLs of an asynchronous run at random moments, and a last process that ends: every step has its
    completions once, and no token is older than the bound, by the log of versions of every life."""
    with tempfile.TemporaryDirectory() as name:
        survives_kills(Path(name), seed, steps=24, bound=1 + seed % 3, kills=4)
