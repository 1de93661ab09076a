"""Rollouts of SmolLM2 beside the training forward pass of the same weights, in a process with one device.

python -m tests.posttrain.smollm2_mismatch float64|float32|bfloat16    # prints its figures as JSON at the end

200 completions of up to 24 tokens in five steps of GRPO with LoRA, with a swap before each. The differences are held
against those between the training forward pass and another one: in float64, for float32, whose rounding this is; and in
float32, for bfloat16, which is what an engine with kernels of its own would differ by, at least. In float64 there is no
other pass: what is left is the rounding to float32 in which a batch carries log-probabilities.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.posttrain import RolloutConfig
from jaxllm.posttrain.policy_training import open_policy_data, with_algorithm
from jaxllm.train import loop
from jaxllm.train.run_model import run_model
from jaxllm.train.step.loss import token_logprobs
from tests.posttrain.checked_feed import CheckedFeed
from tests.posttrain.smollm2_runs import sums, sums_run

STEPS, PROMPTS, GROUP = 5, 5, 8


@contextlib.contextmanager
def wide_numbers(enabled: bool) -> Iterator[None]:
    """64-bit JAX inside the block; not by ``tests.environment``, which makes eight devices."""
    jax.config.update("jax_enable_x64", enabled)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", False)


def compare(folder: Path, dtype: str) -> dict[str, float]:
    """Differences of log-probabilities in nats: the largest, the mean, and the 99th percentile."""
    config = sums_run(folder, 0, sums(0)[0])
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(
            config.model, dtype=dtype, param_dtype="float64" if dtype == "float64" else "float32"
        ),
        rollout=RolloutConfig(prompts=PROMPTS, group=GROUP, max_tokens=24, max_sequences=PROMPTS * GROUP),
        data=dataclasses.replace(config.data, batch_size=24),
        steps=STEPS,
    )
    config = with_algorithm(config)
    feed = CheckedFeed(config, open_policy_data(config))
    if dtype != "float64":
        feed.other = another_pass(config, dtype)
    loop.train(config, data=feed.dataset, feed=feed)
    assert feed.completions == STEPS * PROMPTS * GROUP
    assert len(feed.gaps) == STEPS
    found: dict[str, float] = {}
    for name, gaps in (("", feed.gaps), ("other_", feed.other_gaps)):
        if gaps:
            sizes = np.abs(np.concatenate(gaps))
            found |= {
                f"{name}largest": float(sizes.max()), f"{name}mean": float(sizes.mean()),
                f"{name}p99": float(np.quantile(sizes, 0.99)),
            }  # fmt: skip
    return found | {"tokens": float(sum(gap.size for gap in feed.gaps))}


def another_pass(config: Any, dtype: str) -> Callable[[Any, Any], np.ndarray]:
    """The forward pass of training in a wider type: (parameters, batch) -> log-probabilities of the targets."""
    wider = {"float32": "float64", "bfloat16": "float32"}[dtype]
    own = dataclasses.replace(config.model, dtype=wider, param_dtype=wider)
    model = run_model(dataclasses.replace(config, model=own))

    score = jax.jit(lambda params, batch: token_logprobs(model, params, batch)[0])

    def other(params: Any, batch: Any) -> np.ndarray:
        """Some rows at a time: logits in float64 are large."""
        rows = jax.tree.map(np.asarray, batch)
        with wide_numbers(wider == "float64"):
            wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), wider), params)
            parts = [jax.tree.map(lambda x, i=i: x[i : i + 4], rows) for i in range(0, len(rows.targets), 4)]
            return np.concatenate([np.asarray(score(wide, part)) for part in parts])

    return other


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name, wide_numbers(sys.argv[1] == "float64"):
        made = compare(Path(name), sys.argv[1])
    print(json.dumps(made))
