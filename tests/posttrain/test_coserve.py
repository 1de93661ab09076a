"""Fine-tuning in chunks of tokens beside an engine: gradients, what is saved, and the slack of steps."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque

import jax
import numpy as np
import pytest

from jaxllm.config import ConfigError
from jaxllm.infer import AsyncEngine, SamplingParams
from jaxllm.infer.side_work import SideWork, StepRoom
from jaxllm.models.param_subset import select
from jaxllm.posttrain.coserve.chunked_gradients import ChunkedGradients, Place
from jaxllm.posttrain.coserve.saved_residuals import residual_plan
from jaxllm.posttrain.coserve.step_slack import RECENT_STEPS, SlackScheduler
from jaxllm.posttrain.coserve.work_units import WorkUnit, padded_length, work_units
from jaxllm.simulate import make_trace
from tests import tiny
from tests.environment import AS_EVER
from tests.infer import engines
from tests.infer.engines import MODELS
from tests.posttrain.chunked_steps import OBJECTIVE, adapted, step_error, whole_bytes
from tests.posttrain.paper_finetuning import serve_trace
from tests.simulate.served import deployment


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize(
    ("family", "chunk", "rows", "targets"),
    [("qwen3", 5, 1, ("attention", "mlp")), ("mistral", 3, 2, ("q", "v"))],
)
def test_gradients_are_those_of_whole_rows(float64, family, chunk, rows, targets):
    """Packed rows of 11 tokens; the sliding window reaches over several chunks, and the last chunk is padded."""
    model, params, mask = adapted(MODELS[family], targets=targets)
    batch = tiny.batch(3, 2, 11, model.config.vocab_size, packed=True, padding=True)
    assert step_error(model, params, mask, batch, chunk, rows) < 1e-10


@pytest.mark.drawn(3)
def test_saved_bytes_are_below_those_of_the_unpruned_backward(float64):
    """Also of the compiled program: it returns what is saved of a chunk, and the cache."""
    model, params, mask = adapted(MODELS["llama"], targets=("q", "v"))
    batch = tiny.batch(3, 1, 16, model.config.vocab_size, packed=True)
    step = ChunkedGradients(model, OBJECTIVE, mask, rows=1, seq_len=16, chunk=8)
    assert step.saved_bytes + step.cache_bytes < whole_bytes(model, params, batch, mask) < whole_bytes(
        model, params, batch
    )  # fmt: skip
    trained, frozen = select(mask, params), select(jax.tree.map(lambda own: not own, mask), params)
    inputs = trained, frozen, batch, Place(0, 0, True, True), step.empty_cache(), step.empty_sums(batch)
    saved = jax.jit(lambda *inputs: step.forward(*inputs)[2]).lower(*inputs).compile(AS_EVER)
    assert saved.memory_analysis().output_size_in_bytes == pytest.approx(step.saved_bytes / step.chunks, abs=256)


def test_residuals_of_what_the_backward_pass_has_are_not_saved():
    def pullback_of(weight, x):
        return jax.vjp(lambda a: ((x @ (weight.T.T * 1.0)) @ a) ** 2, weight)[1]

    shape = jax.ShapeDtypeStruct((3, 3), np.float32)
    plan = residual_plan(pullback_of, shape, jax.ShapeDtypeStruct((2, 3), np.float32))
    assert {one.shape for one in plan.shapes} == {(2, 3)}
    weight, x = np.eye(3, dtype=np.float32), np.ones((2, 3), np.float32)
    made = pullback_of(weight, x)
    again = plan.restored(pullback_of(weight, np.zeros_like(x)), plan.saved(made))
    np.testing.assert_array_equal(again(np.ones((2, 3), np.float32))[0], made(np.ones((2, 3), np.float32))[0])


def test_units_of_a_step():
    segments = np.array([[1, 1, 2, 2, 0, 0], [0] * 6, [1, 0, 0, 0, 0, 0]], np.int32)
    units = list(work_units(segments, 1, 2))
    assert [(u.kind, u.row, u.token) for u in units] == [
        ("forward", 0, 0), ("forward", 0, 2), ("backward", 0, 2), ("backward", 0, 0),
        ("forward", 2, 0), ("backward", 2, 0), ("update", 0, 0),
    ]  # fmt: skip
    assert [u.fresh for u in units] == [True, False, True, False, False, False, False]
    assert [u.last for u in units if u.kind == "backward"] == [True, False, True]
    assert [u.kind for u in work_units(np.zeros((2, 4), np.int32), 1, 4)] == ["forward", "backward", "update"]
    assert padded_length(11, 4) == 12


class CountedUnits:
    """Units without programs."""

    def __init__(self, count: int):
        self.units = deque([WorkUnit("forward", tokens=8), WorkUnit("backward", tokens=8)] * count)
        self.behind, self.closed = False, False

    def peek(self) -> WorkUnit | None:
        return self.units[0] if self.units else None

    def run_next(self, *, wait: bool) -> float:
        self.units.popleft()
        return 0.5 if wait else 0.0

    def mark(self) -> None: ...

    def counters(self) -> dict[str, int]:
        return {"finetune_steps": 0}

    def close(self) -> None:
        self.closed = True


def slack(count: int = 10, target: float = 10.0) -> tuple[SlackScheduler, CountedUnits]:
    source = CountedUnits(count)
    return SlackScheduler(source, target, {"forward": 1.0, "backward": 2.0, "update": 0.1}), source


def test_units_fill_what_a_step_leaves():
    work, source = slack()
    assert isinstance(work, SideWork)
    room = StepRoom("prompt-16", tokens=100)
    assert work.fill(room) == 0  # the first step of a program is measured by itself
    assert work.landed(room, 0.0, 4.0) == 4.0
    assert work.fill(room) == 6.0  # forward 1, backward 2, twice: 4 + 6 = 10
    assert work.landed(room, 6.0, 10.5) == 4.5
    assert work.fill(room) == 4.0  # the slower step leaves 5.5 seconds
    assert work.fill(dataclasses.replace(room, tokens=17)) == 3.0  # and this one two chunks of 8 tokens
    assert work.fill(dataclasses.replace(room, tokens=7)) == 0
    assert work.squeezed == 1
    left = sum(unit.kind == "forward" for unit in source.units)
    assert work.counters()["finetune_forward_tokens"] == 8 * (10 - left)


def test_a_decode_loop_has_the_time_of_all_its_tokens():
    work, _ = slack(target=1.0)
    room = StepRoom("decode-4", tokens=100, passes=8)
    work.landed(room, 0.0, 4.5)
    assert work.fill(room) == 3.0


def test_a_slow_step_is_forgotten_and_nothing_runs_ahead():
    work, source = slack(count=100)
    room = StepRoom("decode-4", tokens=8)
    work.landed(room, 0.0, 9.5)
    assert work.fill(room) == 0
    for _ in range(RECENT_STEPS):
        work.landed(room, 0.0, 4.0)
    assert work.fill(room) == 1.0
    source.behind = True
    assert work.fill(room) == 0


def test_units_run_alone_one_at_a_time_and_are_timed():
    work, source = slack(count=1)
    work.run_alone()
    assert work.expected("forward") == 1.0
    assert len(source.units) == 1
    work.run_alone()
    assert not work.has_work
    work.run_alone()
    work.close()
    assert source.closed
    with pytest.raises(ValueError, match="give a positive number"):
        slack(target=0.0)


@pytest.mark.drawn(3)
def test_what_chunks_cannot_do_is_refused():
    model, _, mask = adapted(
        dataclasses.replace(MODELS["llama"], remat="sqrt", layers=4, dtype="float32", param_dtype="float32")
    )
    with pytest.raises(ConfigError, match="none, elementwise, attention, full"):
        ChunkedGradients(model, OBJECTIVE, mask, rows=1, seq_len=16, chunk=8)
    with pytest.raises(ValueError, match="pad the rows"):
        ChunkedGradients(model, OBJECTIVE, mask, rows=1, seq_len=16, chunk=5)
    model = adapted(dataclasses.replace(MODELS["llama"], dtype="float32", param_dtype="float32"))[0]
    with pytest.raises(ConfigError, match="adapters of layers alone, not embedding too"):
        ChunkedGradients(model, OBJECTIVE, jax.tree.map(lambda _: True, model.abstract()), rows=1, seq_len=8, chunk=8)


@pytest.mark.drawn(0.6)
def test_an_engine_in_a_thread_runs_units_beside_and_between_requests():
    """The thread sleeps when they are done, and ends them when it ends."""
    plain = engines.engine("roomy")
    work, source = slack(count=30)
    plain.side_work = work

    async def main() -> list[int]:
        async with AsyncEngine(plain) as engine:
            while len(source.units) > 50:
                await asyncio.sleep(0.001)
            params, tokens = SamplingParams(max_tokens=20, temperature=0.0), list[int]()
            async for delta in engine.stream([1, 2, 3], params):
                tokens += delta.tokens
            while plain.busy:
                await asyncio.sleep(0.001)
            return tokens

    found = asyncio.run(main())
    assert not source.units
    assert source.closed
    assert plain.side_work is None
    request = plain.submit([1, 2, 3], SamplingParams(max_tokens=20, temperature=0.0))
    while plain.busy:
        plain.step()
    assert request.sequences[0].tokens[3:] == found


def test_tokens_come_within_the_target_on_a_simulated_clock():
    """A tiny model whose steps take a millisecond; the target leaves room for some chunks."""
    one = deployment()
    trace = make_trace("poisson:200", lengths="24/16", count=20, seed=1)
    alone = serve_trace(one, trace, target=1.0, chunk=16, seq_len=64, finetune=False)
    target = 4 * float(alone.gaps.max())
    found = serve_trace(one, trace, target=target, chunk=16, seq_len=64)
    assert alone.share == 0
    assert alone.p99 < found.p99 <= target
    assert 0.3 < found.share <= 1
