"""Pipelined speculation (PipeInfer), simulated on four stages, beside synchronous speculation and plain decoding."""

from __future__ import annotations

import numpy as np

from jaxllm.simulate.pipelined_speculation import PipelineCosts, pipelined_speculation, synchronous_speculation
from tests.proofs.harness import proof
from tests.simulate.test_pipelined_speculation import VOCAB, draft_of, greedy, target

TOKENS, LENGTHS = 300, range(1, 9)


@proof("speculation", count=60, sample=4, counts=("speed-up at low acceptance", "at high", "share of stage-steps"))
def pipelined_beside_synchronous(seed: int) -> dict[str, float]:
    """Four stages: tokens are greedy decoding's. At low acceptance a token takes less time than with the best length of
    synchronous speculation, and never more than in plain decoding.

    Half of the draws have acceptance up to 0.4; drafts that take up to a stage's time. Runs cancelled in flight cost
    fewer stage-steps than the same runs without cancellation, and no more time.
    """
    rng = np.random.default_rng(seed)
    low = seed % 2 == 0
    rate = float(rng.uniform(0, 0.4) if low else rng.uniform(0.4, 0.95))
    costs = PipelineCosts(4, 1.0, float(rng.choice([0.0, 0.05])), float(rng.uniform(0.05, 1.0)))
    prompt, draft = rng.integers(0, VOCAB, 3).tolist(), draft_of(rate, seed)
    want, batch = greedy(prompt, TOKENS), int(rng.integers(1, 5))
    waiting = [synchronous_speculation(target, draft, prompt, TOKENS, costs, length) for length in LENGTHS]
    own, flowing = (
        pipelined_speculation(target, draft, prompt, TOKENS, costs, batch=batch, cancel=cancel)
        for cancel in (True, False)
    )
    assert all(one.tokens == want for one in (*waiting, own, flowing))
    best = min(one.latency for one in waiting)
    assert own.latency < best or not low
    assert own.latency <= costs.stages * costs.stage, "never slower than plain decoding"
    assert own.cancelled
    assert own.stage_steps < flowing.stage_steps
    assert own.seconds <= flowing.seconds
    gain = best / own.latency
    # Sums over all draws: half of them are of either kind.
    return {
        "speed-up at low acceptance": gain if low else 0.0,
        "at high": 0.0 if low else gain,
        "share of stage-steps": own.stage_steps / flowing.stage_steps,
    }
