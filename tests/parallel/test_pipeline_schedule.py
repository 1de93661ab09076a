"""Pipeline schedules: legal, with the activations and bubbles of their papers."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxllm import cli
from jaxllm.parallel.pipeline.offload_simulation import simulate_offload
from jaxllm.parallel.pipeline.schedule import OpCosts, PipelineOp, ScheduleError, check
from jaxllm.parallel.pipeline.schedule_generators import INTERLEAVED, NAMES, VEES, make, peak_of_vee
from jaxllm.parallel.pipeline.schedule_table import tabulate
from jaxllm.parallel.pipeline.schedule_view import draw, text


@st.composite
def sizes(draw_: st.DrawFn) -> tuple[str, int, int, int]:
    """Arguments of ``make``; created in the test, since this takes long on a busy machine."""
    name = draw_(st.sampled_from(NAMES))
    stages = draw_(st.integers(2, 7))
    chunks = draw_(st.integers(2, 4)) if name in INTERLEAVED else 0
    micro = stages * draw_(st.integers(1, 3)) if name == "interleaved" else draw_(st.integers(1, 16))
    return name, stages, micro, chunks


@settings(max_examples=25)
@given(sizes())
def test_every_schedule_computes_everything_once_and_in_order(sizes):
    schedule = make(*sizes)
    check(schedule)
    assert all(schedule.live(stage)[-1] == 0 for stage in range(schedule.stages)), "something is held for ever"
    assert schedule.peak <= schedule.micro_batches


@settings(max_examples=10)
@given(st.integers(2, 12), st.integers(1, 40))
def test_gpipe_and_1f1b_are_as_long_as_theory_says(stages, micro):
    ideal = (stages - 1) / (micro + stages - 1)
    for name, peak in (("gpipe", micro), ("1f1b", min(stages, micro))):
        schedule = make(name, stages, micro)
        for costs in (OpCosts(), OpCosts(2, 1, 3)):
            assert schedule.bubble(costs) == pytest.approx(ideal)
            assert schedule.idle(costs) == pytest.approx(ideal)
        assert schedule.peak == peak
    assert make("1f1b", stages, micro).peaks == tuple(min(micro, stages - s) for s in range(stages))


@settings(max_examples=25)
@given(st.integers(2, 8), st.integers(2, 4), st.integers(2, 5))
def test_interleaved_divides_the_bubble_by_its_chunks(stages, chunks, groups):
    micro = stages * groups
    schedule = make("interleaved", stages, micro, chunks)
    assert schedule.bubble() == pytest.approx((stages - 1) / (chunks * micro + stages - 1))
    assert schedule.peak == pytest.approx((2 * (stages - 1) + (chunks - 1) * stages + 1) / chunks)


@settings(max_examples=15)
@given(st.integers(2, 8), st.integers(2, 4), st.integers(1, 4))
def test_groups_of_the_stages_take_the_time_of_interleaved_and_hold_less(stages, chunks, groups):
    """Generalized interleaving (arXiv:2503.01328): no more idle time whatever the passes take, as many ticks."""
    micro = stages * groups
    plain, made = make("interleaved", stages, micro, chunks), make("gis", stages, micro, chunks)
    for costs in (OpCosts(), OpCosts(2, 1, 1), OpCosts(1, 1.5, 1.5)):
        assert made.bubble(costs) == pytest.approx((stages - 1) / (chunks * micro + stages - 1))
    assert tabulate(made).ticks == tabulate(plain).ticks
    assert made.peak == stages
    assert plain.peak > made.peak or groups == 1


@settings(max_examples=15)
@given(st.integers(2, 12), st.integers(2, 4), st.integers(0, 20))
def test_groups_of_one_take_the_time_of_1f1b_and_hold_less(stages, chunks, more):
    """With two chunks (P + K) / 2, K the least odd number from 2/3 P on; a quarter of P beside an offloaded chunk."""
    micro = 2 * stages + more
    made = make("gis_min", stages, micro, chunks)
    for costs in (OpCosts(), OpCosts(2, 1, 1)):
        assert made.bubble(costs) <= (stages - 1) / (micro + stages - 1) + 1e-12
    if chunks == 2:
        wait = -(-2 * stages // 3)
        assert made.peak == (stages + wait + 1 - wait % 2) / 2
        assert made.peak < stages or stages in (2, 3, 5)
        assert tabulate(made, {0}).saves == -(-stages // 2)
        assert tabulate(make("interleaved", stages, 2 * stages), {0}).saves == stages


@settings(max_examples=10)
@given(st.integers(2, 12), st.integers(0, 20))
def test_zero_bubble(stages, more):
    """arXiv:2401.10241, table 1: bubbles of (p-1)(F+B-W) and none; activations of p and 2p-1 micro-batches."""
    micro = 2 * stages + more
    first, second = make("zb_h1", stages, micro), make("zb_h2", stages, micro)
    assert first.bubble() == pytest.approx((stages - 1) / (3 * micro + stages - 1))
    assert second.bubble() == pytest.approx(0)
    assert first.peaks == (stages,) * stages
    assert second.peak == 2 * stages - 1


@pytest.mark.drawn(0.3)
@settings(max_examples=5)
@given(st.integers(2, 8), st.integers(0, 6))
@example(12, 5)
def test_vees_hold_what_their_paper_says(stages, more):
    """arXiv:2405.15362: a third of 1F1B's activations, a half, and as many without a bubble."""
    micro = 3 * stages + more
    made = {name: make(name, stages, micro) for name in VEES}
    for name, schedule in made.items():
        assert schedule.peak <= peak_of_vee(name, stages)
    assert made["v_min"].peak > stages / 3
    assert made["v_half"].peak >= stages / 2
    plain = make("1f1b", stages, micro).bubble()
    assert made["v_half"].bubble() < 0.65 * plain
    assert make("v_zb", stages, 2 * stages - 1 + more).bubble() == pytest.approx(0, abs=1e-12)
    assert make("v_zb", stages, 2 * stages - 1 + more).peaks == (stages,) * stages
    few = 2 * stages - 2
    assert 0 < make("v_zb", stages, few).bubble() < 0.65 * make("1f1b", stages, few).bubble()
    assert made["v_min"].bubble() < plain


@settings(max_examples=25)
@given(sizes(), st.integers(0, 2**32 - 1))
def test_the_checker_refuses_what_is_wrong(sizes, number):
    schedule = make(*sizes)
    stage = number % schedule.stages
    order = list(schedule.orders[stage])
    at = number // schedule.stages % len(order)
    op = order[at]

    def refused(rows: tuple[tuple[PipelineOp, ...], ...]) -> None:
        with pytest.raises(ScheduleError, match=r"stage|rows for"):
            check(dataclasses.replace(schedule, orders=rows))

    def with_row(row: list[PipelineOp]) -> tuple[tuple[PipelineOp, ...], ...]:
        return (*schedule.orders[:stage], tuple(row), *schedule.orders[stage + 1 :])

    refused(with_row(order[:at] + order[at + 1 :]))
    refused(with_row([*order, op]))
    refused(with_row([*order[:at], op._replace(micro=schedule.micro_batches), *order[at + 1 :]]))
    refused(schedule.orders[1:])
    needs = [need for there, need in schedule.needs(stage, op) if there == stage]
    if needs:
        early = [o for o in order if o != op]
        early.insert(early.index(needs[0]), op)
        refused(with_row(early))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("1f1d", 4, 8), "there are gpipe, 1f1b, interleaved"),
        (("1f1b", 1, 8), "2 or more"),
        (("1f1b", 4, 0), "1 or more"),
        (("1f1b", 4, 8, 2), '"1f1b" has 1; "interleaved", "gis" and "gis_min"'),
        (("v_half", 4, 8, 3), '"v_half" has 2'),
        (("interleaved", 4, 6), "a multiple of the 4 stages: 4 or 8"),
        (("interleaved", 4, 3), "a multiple of the 4 stages: 4"),
        (("interleaved", 4, 8, 1), 'with 1 it is the schedule "1f1b"'),
        (("gis", 4, 8, 1), '"gis" needs 2 or more'),
    ],
)
def test_illegal_sizes_say_what_is_legal(arguments, says):
    with pytest.raises(ScheduleError, match=re.escape(says)):
        make(*arguments)


def test_the_picture_in_letters():
    lines = text(make("1f1b", 2, 2)).split("\n")
    assert lines[-2] == "stage 0   F0 F1       B0---    B1---"
    assert lines[-1] == "stage 1      F0 B0--- F1 B1---"
    assert "bubble 33.3%" in lines[1]
    assert "2 micro-batches" in lines[2]
    assert "--png" in text(make("1f1b", 2, 2), OpCosts(1.0, 1.0, 0.7)).split("\n")[-1]
    assert "wide" in text(make("1f1b", 2, 90)).split("\n")[-1]


def test_the_picture(tmp_path):
    file = tmp_path / "schedule.png"
    draw(make("v_half", 4, 6), file)
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@settings(max_examples=15)
@given(sizes(), st.floats(0, 1), st.floats(0.2, 1))
def test_offload_keeps_its_room_where_any_does(sizes, copy, part):
    """Peaks of stages without offload are the schedule's; with it none is larger, and selective offload keeps its room
    wherever full offload does.
    """
    schedule = make(*sizes)
    plan = simulate_offload(schedule, copy, part * schedule.peak)
    assert tuple(one.peak for one in plan.none) == schedule.peaks
    for none, half, some, full in zip(plan.none, plan.half, plan.selective, plan.full, strict=True):
        assert max(half.peak, some.peak, full.peak) <= none.peak
        assert some.peak <= max(plan.room, full.peak) + 1e-9
        assert some.moved == frozenset() or none.peak > plan.room
        assert none.share == 0 <= some.share <= 1


@pytest.mark.parametrize(("copy", "room"), [(0.0, 2), (0.5, 2), (0.9, 2), (0.5, 3)])
def test_offload_of_1f1b_is_of_the_first_stages_and_as_little_as_possible(copy, room):
    """Of six stages each holds one micro-batch fewer than the one before; every set of activations is tried."""
    stages, micro = 6, 7
    schedule = make("1f1b", stages, micro)
    plan = simulate_offload(schedule, copy, room)
    shares = [one.share for one in plan.selective]
    assert [one.peak for one in plan.none] == [6, 5, 4, 3, 2, 1]
    assert shares == sorted(shares, reverse=True)
    assert shares[-room:] == [0.0] * room
    for stage, row in enumerate(schedule.timeline()):
        times = {one.op: one for one in row}
        lives = {op: (one.start, one.end, times[op._replace(kind="B")]) for op, one in times.items() if op.kind == "F"}

        def held(away: frozenset[PipelineOp], lives=lives) -> int:
            """Activations at the fullest time, with copies behind F and before B one after the other."""
            spans, free = [(start, use.end) for start, _, use in lives.values()], 0.0
            if away:
                out = {}
                for op in sorted(away, key=lambda op: lives[op][1]):
                    free = out[op] = max(free, lives[op][1]) + copy
                back, free = {}, float("inf")
                for op in sorted(away, key=lambda op: -lives[op][2].start):
                    free = back[op] = min(free, lives[op][2].start) - copy
                if any(back[op] < out[op] for op in away):
                    return micro + 1
                spans = [(start, out[op] if op in away else use.end) for op, (start, _, use) in lives.items()]
                spans += [(back[op], lives[op][2].end) for op in away]
            return max(sum(a <= t < b for a, b in spans) for t, _ in spans)

        sets = [frozenset(some) for n in range(micro + 1) for some in itertools.combinations(lives, n)]
        fewest = min((len(some) for some in sets if held(some) <= room), default=None)
        own = plan.selective[stage]
        assert held(own.moved) == own.peak
        assert fewest is None or len(own.moved) == fewest


def test_offload_is_printed(capsys):
    assert cli.main(["pipeline", "1f1b", "--stages", "4", "--offload", "0.5", "--room", "2"]) == 0
    assert "stage  none  half  at most 2  full  of them offloaded" in capsys.readouterr().out
    assert cli.main(["pipeline", "1f1b", "--room", "2"]) == 2
    assert "give --offload TIME too" in capsys.readouterr().err
