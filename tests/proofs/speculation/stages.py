"""Pipeline stages in the engine, and runs of drafts through them (PipeInfer): the same tokens, in less time."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxllm.infer import Engine, EngineConfig, SamplingParams
from jaxllm.infer.engine_config import DRAFT_TOKENS
from jaxllm.infer.scheduling.scheduler import Scheduler
from jaxllm.infer.scheduling.sequence import Sequence
from jaxllm.infer.stages.draft_runs import DraftRuns
from jaxllm.infer.stages.pipeline_clock import DeviceClock, SimulatedClock
from jaxllm.infer.stages.staged_runner import StagedRunner
from pallas_kernels.paged_attention.kv_formats import kv_format, quantised_formats
from tests.infer import engines, meshes
from tests.infer.proposers import OracleProposer
from tests.infer.test_verification import asked, equal, plainly_sampled
from tests.proofs.harness import proof

CASES = [
    ("stage=4", "deep llama", "tight, swap", "auto"),
    ("stage=4", "deep llama", "one after the other", "auto"),
    ("stage=2,tensor=2", "deep qwen3", "tight, recompute", "auto"),
    ("stage=4,tensor=2", "deep llama", "roomy", "auto"),
    ("stage=3", "deep gemma2", "tight, swap", "auto"),
    ("stage=2", "deep gpt2", "contiguous", "auto"),
    ("stage=4", "deep phi3", "layers apart", "auto"),
    ("stage=4", "deep mixtral", "tight, recompute", "auto"),
    ("stage=2", "deep deepseek_v3", "tight, swap", "auto"),
    ("stage=3", "deep gpt_oss", "roomy", "auto"),
    ("stage=4", "deep llama", "invariant", "auto"),
    ("stage=4", "deep llama", "tight, swap", "int8"),
    ("stage=3", "deep gemma2", "tight, recompute", "int4"),
    ("stage=2,tensor=2", "deep qwen3", "roomy", "kivi4"),
]
"""(mesh, model, way to serve, format of the KV cache)."""


@proof("speculation", cases=CASES, sample=1, float64=True, bound=1e-10)
def stages_say_the_same(case: tuple[str, str, str, str]) -> float:
    """Random traffic over pipeline stages: tokens are one device's, log-probabilities those of the training forward.

    Prompts in chunks, common prefixes, several completions, too few pages where the way says so. Several steps are in
    flight, and no program is compiled meanwhile.
    """
    mesh, model, way, kv = case
    config = dataclasses.replace(engines.ENGINES[way], kv_dtype=kv)
    apart = way == "layers apart"
    staged = meshes.over(mesh, model, config, "float64", apart=apart)
    plain = engines.build(config, model, "float64", apart=apart)
    most, worst = 0, 0.0
    for seed in range(2):
        requests = asked(np.random.default_rng([seed, *model.encode(), *way.encode()]), config, 8)
        want = engines.serve(plain, requests)
        before, start = staged.step, staged._start_step

        def watched(plans: Any, start: Any = start) -> Any:
            nonlocal most
            most = max(most, 1 + len(staged._in_flight))
            return start(plans)

        staged._start_step = watched  # type: ignore[method-assign]
        got = engines.serve(staged, requests)
        staged.step, staged._start_step = before, start  # type: ignore[method-assign]
        equal(got, want)
        if kv == "auto":
            worst = max(worst, engines.error(model, "float64", got))
    assert most > 1 or config.max_sequences == 1
    assert staged.runner.program_cache.counts.late == 0  # type: ignore[union-attr]
    return worst


MOST, RUNS = 3, 5
"""Draft tokens of a run, and runs of a sequence."""


def in_runs(engine: Engine, proposer: Any, runs: int, tokens: int) -> None:
    """Gives an engine a proposer and a number of runs; with 1 a draft waits for the verification of the one before."""
    scheduler = engine.scheduler
    assert isinstance(scheduler, Scheduler)
    engine.proposer = scheduler.proposer = proposer
    config = dataclasses.replace(engine.config, draft_runs=runs, verify_tokens=tokens)
    engine.draft_runs = scheduler.draft_runs = DraftRuns(config) if runs > 1 else None


@proof("speculation", count=40, sample=1, float64=True, bound={"error": 1e-10}, counts=("verified", "cancelled"))
def runs_in_flight_say_the_same(seed: int) -> dict[str, float]:
    """Completions with drafts at random in runs through pipeline stages are those of plain decoding.

    Greedy and sampled, several sequences, with logits processors, short of pages, preempted by swapping or recomputing,
    and with cancelled requests. Runs behind a wrong token are cancelled in flight.
    """
    rng = np.random.default_rng(seed)
    way = str(rng.choice(["roomy", "tight, recompute", "tight, swap", "contiguous", "one after the other"]))
    model = str(rng.choice(["deep llama", "deep gemma2", "deep mixtral", "deep deepseek_v3"]))
    lossy = [form for form in quantised_formats() if not (kv_format(form).residual or kv_format(form).orders_channels)]
    kv = "auto" if rng.random() < 0.6 or "deepseek" in model else str(rng.choice(lossy))
    oracle = OracleProposer("silent", rng, engines.VOCAB)
    config = dataclasses.replace(engines.ENGINES[way], verify_tokens=MOST, draft_runs=RUNS, kv_dtype=kv)
    engine = meshes.over(f"stage={int(rng.integers(2, 5))}", model, config, "float64", proposer=oracle)
    runner = engine.runner
    assert isinstance(runner, StagedRunner)
    requests = asked(rng, config, 6)
    in_runs(engine, oracle, 1, MOST)
    want = engines.serve(engine, requests)
    oracle.learn(want)
    in_runs(engine, oracle, RUNS, MOST)
    worst = 0.0
    for mode in ("all", "some", "none"):
        oracle.mode = mode
        runner.use_clock(SimulatedClock())  # whose stages take long enough for runs to be behind one another
        got = engines.serve(engine, requests)
        equal(got, want)
        if kv == "auto":
            worst = max(worst, engines.error(model, "float64", got))
    alone = [one | {"at": 0} for one in plainly_sampled(rng)]
    oracle.mode = "silent"
    said = [engines.serve(engine, [one]) for one in alone]
    for known in said:
        oracle.learn(known)
    oracle.mode = "none"
    for one, known in zip(alone, said, strict=True):
        equal(engines.serve(engine, [one]), known)
    oracle.mode = "some"
    runner.use_clock(DeviceClock())
    equal(engines.serve(engine, requests), want)
    engines.serve(engine, [one | {"cancel": int(rng.integers(5, 30))} for one in requests])
    assert runner.counts.cancelled_steps
    assert engine.metrics.accepted_tokens
    assert runner.program_cache.counts.late == 0
    return {
        "error": worst,
        "verified": float(engine.metrics.proposed_tokens),
        "cancelled": float(runner.counts.cancelled_steps),
    }


class TimedDraft:
    """Draft that is right in so many places, the same for the same tokens, and takes its time on a simulated clock.

    Attributes:
        most: most tokens of a draft.
    """

    def __init__(self, known: list[int], rate: float, seed: int, clock: SimulatedClock, most: int):
        self.known, self.rate, self.seed, self.clock, self.most = known, rate, seed, clock, most

    def propose(self, sequence: Sequence, count: int) -> list[int]:
        """Proposes tokens after a sequence's."""
        tokens, begin = list(sequence.tokens), len(sequence.tokens)
        for true in self.known[begin : begin + min(count, self.most)]:
            right = np.random.default_rng([self.seed, len(tokens), *tokens[-3:]]).random() < self.rate
            tokens.append(true if right else (true + 1) % engines.VOCAB)
        self.clock.drafted(len(tokens) - begin)
        return tokens[begin:]


LENGTHS = (1, 2, 3, 4)
_STAGES: list[Engine] = []


def _engine_of_four_stages() -> Engine:
    if not _STAGES:
        config = EngineConfig(
            max_sequences=1, max_batched_tokens=8, pages=20, page_size=8, buckets=(8,), samplers=("plain",),
            max_len=engines.LONGEST, verify_tokens=max(LENGTHS), draft_runs=RUNS,
        )  # fmt: skip
        silent = OracleProposer("silent", np.random.default_rng(0), engines.VOCAB)
        _STAGES.append(meshes.over("stage=4", "deep llama", config, "float64", proposer=silent))
    return _STAGES[0]


DRAWN = 10
"""Draws of a unit; four of five have low acceptance."""


@proof("speculation", count=12, sample=1, float64=True, bound={"time to synchronous": 1.0, "time to plain": 1.05},
       counts=("speed-up at low acceptance", "at high", "share of stage-steps"))  # fmt: skip
def runs_beside_synchronous(seed: int) -> dict[str, float]:
    """The engine on four stages, by a simulated clock: tokens are greedy decoding's.

    At acceptance up to 0.3 (of eight draws) runs of a token take less time on the average than synchronous speculation
    of the default length, and at most 5% more than plain decoding in any draw. A drafted token takes up to 0.3 of a
    stage's time. The speed-ups are over the best of four lengths. Runs that are cancelled in flight cost fewer
    stage-steps than runs that flow through, and no more time.
    """
    rng, engine = np.random.default_rng(seed), _engine_of_four_stages()
    draws = [_beside_synchronous(engine, rng, low=draw % 5 < 4) for draw in range(DRAWN)]
    lows = [draw for draw in draws if draw["low"]]
    mean = lambda name, some: float(np.mean([draw[name] for draw in some]))  # noqa: E731
    return {
        "time to synchronous": mean("to default", lows),
        "time to plain": max(draw["to plain"] for draw in draws),
        "speed-up at low acceptance": mean("to best", lows),
        "at high": mean("to best", [draw for draw in draws if not draw["low"]]),
        "share of stage-steps": mean("stage-steps", draws),
    }


def _beside_synchronous(engine: Engine, rng: np.random.Generator, low: bool) -> dict[str, float]:
    """One draw of prompt, acceptance and times, by runs, synchronous drafts and plain decoding."""
    runner = engine.runner
    assert isinstance(runner, StagedRunner)
    rate = float(rng.uniform(0, 0.3) if low else rng.uniform(0.3, 0.95))
    row, draft, size = (
        float(rng.choice([0.0, 0.05])),
        float(rng.uniform(0.02, 0.3)),
        1 if low else int(rng.integers(1, 4)),
    )
    prompt, seed = rng.integers(0, engines.VOCAB, 5).tolist(), int(rng.integers(2**31))
    known: list[int] = []

    def measured(runs: int, most: int, cancels: bool = True) -> tuple[float, int]:
        nonlocal known
        clock = SimulatedClock(1.0, row, draft)
        runner.use_clock(clock)
        runner.cancels, before = cancels, runner.counts.stage_steps
        in_runs(engine, TimedDraft(known, rate, seed, clock, most), runs, max(LENGTHS) if runs == 1 else most)
        request = engine.submit(prompt, SamplingParams(max_tokens=50, temperature=0.0))
        while engine.busy:
            engine.step()
        engines.check_books(engine)
        assert not known or request.sequences[0].tokens == known
        known = list(request.sequences[0].tokens)
        return clock.now, runner.counts.stage_steps - before

    plain, _ = measured(1, 0)
    waiting = [measured(1, length)[0] for length in LENGTHS]
    best = min(waiting)
    own, steps = measured(RUNS, size)
    flowing, all_steps = measured(RUNS, size, cancels=False)
    assert steps < all_steps
    assert own <= flowing + 1e-9
    return {
        "low": float(low),
        "to default": own / waiting[LENGTHS.index(DRAFT_TOKENS)],
        "to plain": own / plain,
        "to best": best / own,
        "stage-steps": steps / all_steps,
    }
