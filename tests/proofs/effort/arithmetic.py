"""Adaptive best-of-k beside uniform best-of-N: SmolLM2 after a short SFT on checkable arithmetic, held-out prompts."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from math import comb
from pathlib import Path

import jax
import numpy as np

from jaxllm.effort import (
    AdaptiveBestOfK,
    ArithmeticVerifier,
    EffortSolver,
    SampleOutcomes,
    SuccessProbe,
    price_of,
    sample_outcomes,
)
from jaxllm.effort.adaptive_best_of_k import samples_at_price
from jaxllm.infer import LLM, EngineConfig, SamplingParams
from tests import environment
from tests.proofs.harness import proof

UNIFORM, MOST = 8, 16
"""N of the uniform policy, and most samples of a prompt under the adaptive one."""
STEPS, PROBED, SAMPLES = 90, 640, 4
"""Steps of the SFT; prompts that the probe is fitted to, and samples of each: more prompts tell more than samples."""
PRICED, HELD_OUT = 160, 160
"""Prompts that the price is fitted to, and those that measure."""
KINDS = (
    ((100, 999), "+", (1, 1)),
    ((100, 999), "+", (10, 10)),
    ((100, 999), "+", (100, 100)),
    ((10, 99), "+", (1, 9)),
    ((100, 999), "+", (10, 99)),
    ((100, 999), "-", (100, 999)),
    ((1000, 9999), "-", (1000, 9999)),
    ((100, 999), "*", (10, 99)),
    ((100, 999), "*", (100, 999)),
    ((1000, 9999), "*", (2, 9)),
)
"""Ranges of the numbers of tasks, and their operation: the first half some samples solve, the others hardly any."""
TEMPERATURE = 0.6
SETTINGS = {
    "data.content": "text",
    "data.seq-len": "64",
    "data.batch-size": "8",
    "data.heldout-fraction": "0",
    "accumulate": "1",
    "optim.schedule.peak": "3e-4",
    "checkpoint.every": "1000",
}


def tasks(rng: np.random.Generator, count: int) -> list[str]:
    """Different prompts, of all kinds alike."""
    found = dict[str, None]()
    while len(found) < count:
        left, sign, right = KINDS[int(rng.integers(len(KINDS)))]
        one, two = (int(rng.integers(least, most + 1)) for least, most in (left, right))
        found[f"{one}{sign}{two}="] = None
    return list(found)


def fine_tuned(folder: Path, prompts: list[str], seed: int) -> Path:
    """SmolLM2 after the SFT on these prompts with their values, in a process of its own; the run's directory."""
    values = [eval(prompt[:-1]) for prompt in prompts]  # of numbers that `tasks` has drawn
    rows = [json.dumps({"text": f"{prompt}{value}"}) for prompt, value in zip(prompts, values, strict=True)]
    (folder / "sums.jsonl").write_text("\n".join(rows) + "\n")
    words = [word for name, value in SETTINGS.items() for word in (f"--{name}", value)]
    command = [sys.executable, "-m", "jaxllm.cli", "train", f"{environment.ROOT / 'recipes' / 'sft.py'}:sft_smollm2"]
    given = ["--data.source", str(folder / "sums.jsonl"), "--steps", str(STEPS), "--seed", str(seed)]
    done = subprocess.run(
        [*command, "--out", str(folder), *given, *words], cwd=environment.ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "sft_smollm2"


def measured(table: SampleOutcomes, counts: np.ndarray) -> tuple[float, float]:
    """Expected share of prompts with a success among so many of their samples, and the tokens of these samples."""
    drawn = table.success.shape[1]
    failed = drawn - table.success.sum(1)
    missed = [comb(int(f), int(k)) / comb(drawn, int(k)) for f, k in zip(failed, counts, strict=True)]
    return 1 - float(np.mean(missed)), float((counts * table.tokens.mean(1)).sum())


def fitted_price(probe: SuccessProbe, table: SampleOutcomes) -> float:
    """Highest price at which these prompts have as many successes as with ``UNIFORM`` samples each."""
    predicted = np.array([probe.predict(state) for state in table.hidden])
    enough, _ = measured(table, np.full(len(predicted), UNIFORM))
    for average in np.arange(1.0, UNIFORM + 0.01, 0.05):
        price = price_of(predicted, float(average), most=MOST)
        if measured(table, counts_of(predicted, price))[0] >= enough:
            return price
    return price


def counts_of(predicted: np.ndarray, price: float) -> np.ndarray:
    """Samples of each prompt."""
    return np.array([samples_at_price(float(p), price, most=MOST, least=1) for p in predicted])


@proof(
    "effort",
    cases=("untrained", 0, 1, 2),
    sample=1,
    quick=("untrained",),
    bound={"tokens": 0.7, "lost success": 0.02},
    counts=("success of uniform", "success of adaptive"),
)
def adaptive_needs_fewer_tokens(case: str | int) -> dict[str, float]:
    """Tokens of adaptive best-of-k over those of uniform best-of-8, on prompts that fitted neither probe nor price.

    The verifier is exact, so that a prompt is solved if one of its samples is right. Success is expected over which of
    the 16 drawn samples a policy has. The policy itself, run by the solver, draws as many samples as the table says.
    Probe and price are fitted to prompts of their own. Half of the prompts are ones that hardly any sample solves: what
    is saved is what uniform best-of-N spends on those, and on prompts that one or two samples solve. The case
    "untrained" is a test of the same on SmolLM2 as it is, with few prompts, of which nothing but these numbers of
    samples is asked.
    """
    seed, sizes = (0, (16, 8, 8)) if case == "untrained" else (int(case), (PROBED, PRICED, HELD_OUT))
    everything = tasks(np.random.default_rng(seed), 3000)
    probed, priced, test, learned = (part.tolist() for part in np.split(np.array(everything), np.cumsum(sizes)))
    with tempfile.TemporaryDirectory() as name:
        model = "smollm2" if case == "untrained" else str(fine_tuned(Path(name), learned, seed))
        engine = EngineConfig(
            max_sequences=32, max_batched_tokens=64, max_len=64, buckets=(64,), decode_steps=1, samplers=("full",)
        )
        solver = EffortSolver(LLM(model, engine))
        params, check = SamplingParams(max_tokens=8, seed=seed, temperature=TEMPERATURE), ArithmeticVerifier()
        table = sample_outcomes(solver, probed, params, check, SAMPLES)
        probe = SuccessProbe.fit(table.hidden, table.rates, penalty=0.1)
        price = fitted_price(probe, sample_outcomes(solver, priced, params, check, MOST))
        held = sample_outcomes(solver, test, params, check, MOST)
        counts = counts_of(np.array([probe.predict(state) for state in held.hidden]), price)
        policy = AdaptiveBestOfK(probe, price, check, most=MOST)
        few = solver.solve(policy, test[:8], params)
    jax.clear_caches()
    assert [len(one.candidates) for one in few] == counts[:8].tolist()
    uniform, adaptive = measured(held, np.full(len(test), UNIFORM)), measured(held, counts)
    print(f"{case}: uniform {uniform}, adaptive {adaptive}, samples a prompt {counts.mean():.2f}")
    if case == "untrained":
        return {"tokens": 0.0, "lost success": 0.0, "success of uniform": 0.0, "success of adaptive": 0.0}
    assert 0.1 < uniform[0] < 0.99, "neither hopeless nor trivial"
    return {
        "tokens": adaptive[1] / uniform[1],
        "lost success": max(0.0, uniform[0] - adaptive[0]),
        "success of uniform": uniform[0],
        "success of adaptive": adaptive[0],
    }
