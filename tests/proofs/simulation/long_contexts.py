"""Long contexts: the four quantities beside the running example of their paper, and users beside a real engine."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import numpy as np

from jaxllm.infer import EngineConfig, SamplingParams
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MlpConfig
from jaxllm.plan.formulas.calibration import Calibration
from jaxllm.plan.hardware import Cluster
from jaxllm.simulate import Deployment
from jaxllm.simulate.long_context import long_context
from jaxllm.simulate.steady_state import decode_seconds
from sharding import MeshSpec
from tests.infer import engines
from tests.proofs.harness import proof

YI_34B = DecoderConfig(
    64_000, 7168, 60, pattern=(BlockConfig(AttentionConfig(56, 8, 128), MlpConfig(20_480)),), tied=False,
    dtype="bfloat16", param_dtype="bfloat16",
)  # fmt: skip
COMPLETION = 250
"""Tokens of a completion in the running example."""


class Example(NamedTuple):
    """Row of the running example of arXiv:2405.08944: a 34B model on an A100 of 80 GB, at the data sheet's rates.

    ``prefill`` and ``decode`` are seconds, of the whole completion; ``users`` is rounded there.
    """

    context: int
    prefill: float
    decode: float
    users: int

    def __str__(self) -> str:
        return f"{self.context} tokens"


EXAMPLES = (Example(4_000, 0.89, 8.5, 20), Example(50_000, 14.1, 9.8, 1))


@proof("simulation", cases=EXAMPLES, sample=1, bound={"prefill": 0.1, "decode": 0.03, "users": 0.2})
def long_contexts_are_the_papers(row: Example) -> dict[str, float]:
    """Users, decode and prefill of a 34B model at 4,000 and 50,000 tokens of context.

    The paper counts half the FLOPs of causal attention that this package counts (3.2 of its 14.1 seconds), so half of
    them are taken off before prefill is compared.
    """
    sheet = Cluster.parse("a100:1x1").hardware
    # The paper leaves nothing for temporaries and plans with all of the memory; whole tiles are not rounded up to.
    hardware = dataclasses.replace(sheet, hbm_bytes=int(80 * 2**30 / 0.9), tile=1)
    config = EngineConfig(max_sequences=64, max_len=row.context, samplers=("plain",))
    one = Deployment(
        YI_34B, Cluster.parse("a100:1x1", {"a100": hardware}), MeshSpec.parse("tensor=1"), config,
        calibration=Calibration(1, 1, 1, 1, 1, 1), launch=0.0,
    )  # fmt: skip
    found = long_context(one, row.context)
    attention = YI_34B.layers * 4 * (row.context**2 / 2) * 56 * 128 / hardware.flops
    decode = COMPLETION * decode_seconds(one, 1, row.context)
    return {
        "prefill": abs((found.prefill - attention / 2) / row.prefill - 1),
        "decode": abs(decode / row.decode - 1),
        "users": abs(found.users / row.users - 1),
    }


@proof("simulation", count=6, sample=1)
def users_are_those_of_a_real_engine(seed: int) -> None:
    """Sequences that generate at a time in an engine of a tiny model with few pages, and the bytes of its page pool.

    Prompts reach into the last page of their context; the pages that are left may hold a part of one more.
    """
    rng = np.random.default_rng(seed)
    page, columns = 8, int(rng.integers(2, 5))
    context, pages = page * columns, int(rng.integers(LEAST_PAGES, 30))
    config = EngineConfig(
        max_sequences=16, max_batched_tokens=16 * context, pages=pages, page_size=page, max_len=engines.LONGEST,
        prefix_cache=False, decode_steps=1, buckets=(16 * context,), samplers=("full",), top_logprobs=3,
    )  # fmt: skip
    engine, running = engines.build(config), 0
    for first in range(16):
        prompt = [first, *rng.integers(0, engines.VOCAB, context - page).tolist()]
        engine.submit(prompt, SamplingParams(max_tokens=page - 1, temperature=0.0, seed=0))
    while engine.busy:
        engine.step()
        whole = [one for one in engine.scheduler.running if one.computed >= len(one.request.prompt)]
        running = max(running, len(whole))
    model = engines.model_of("llama", "float32")
    one = Deployment(model, Cluster.parse("h100:1x1"), MeshSpec.parse("tensor=1"), config)
    assert long_context(one, context).users == running
    held = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(engine.runner.pools))
    assert held == pages * page * one.step_model.token_bytes


LEAST_PAGES = engines.LONGEST // 8 + 1
"""Pages of the longest sequence, which an engine must have room for."""
