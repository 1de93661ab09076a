"""Generators of pipeline schedules: GPipe, 1F1B, interleaved, zero bubble and V-shaped; see ``make``.

A generator first orders the forward and backward operations of each stage. In zero-bubble schedules, which split the
backward pass, the weight gradients (W) then fill idle time, or free activations for the next forward operation.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Literal, get_args

from jaxllm.parallel.pipeline.generalized_interleaving import generalized_interleaved
from jaxllm.parallel.pipeline.schedule import Kind, PipelineOp, Schedule, ScheduleError, check

Name = Literal["gpipe", "1f1b", "interleaved", "gis", "gis_min", "zb_h1", "zb_h2", "v_min", "v_half", "v_zb"]
NAMES: tuple[Name, ...] = get_args(Name)
INTERLEAVED = ("interleaved", "gis", "gis_min")
"""Schedules with any number of chunks."""
VEES = ("v_min", "v_half", "v_zb")


@functools.lru_cache(maxsize=256)
def make(name: str, stages: int, micro_batches: int, chunks: int = 0) -> Schedule:
    """Pipeline schedule by name, checked for correctness.

    Args:
        chunks: virtual stages per stage; 0 for the default of the schedule (two for interleaved and V-shaped ones).

    Raises:
        ScheduleError: there is no such schedule of these sizes; says which there are.
    """
    if name not in NAMES:
        raise ScheduleError(f"no pipeline schedule {name!r}; there are {', '.join(NAMES)}.")
    legal_sizes(name, stages, micro_batches, chunks)
    chunks = chunks or default_chunks(name)
    makers: dict[str, Callable[[int, int, int], Schedule]] = {
        "gpipe": _gpipe,
        "1f1b": _one_f_one_b,
        "interleaved": _interleaved,
        "gis": lambda p, m, v: generalized_interleaved("gis", p, m, v, group=p),
        "gis_min": lambda p, m, v: generalized_interleaved("gis_min", p, m, v, group=1),
        "zb_h1": lambda p, m, v: _zero_bubble("zb_h1", p, m, warm=p, room=p),
        "zb_h2": lambda p, m, v: _zero_bubble("zb_h2", p, m, warm=2 * p - 1, room=2 * p - 1),
        "v_zb": _zero_bubble_vee,
    }
    make_it = makers.get(name) or functools.partial(_vee, name)
    made = make_it(stages, micro_batches, chunks)
    check(made)
    return made


def default_chunks(name: str) -> int:
    """Default number of virtual stages per stage."""
    return 2 if name in (*VEES, *INTERLEAVED) else 1


def legal_sizes(name: str, stages: int, micro_batches: int, chunks: int) -> None:
    """Checks the sizes of a schedule.

    Raises:
        ScheduleError: a size is illegal; says which are legal.
    """
    if stages < 2:
        raise ScheduleError(f"pipeline: {stages} stage: a pipeline needs 2 or more (the mesh axis stage).")
    if micro_batches < 1:
        raise ScheduleError(f"pipeline: micro_batches = {micro_batches}; give 1 or more.")
    if name in INTERLEAVED:
        if chunks == 1 or chunks < 0:
            raise ScheduleError(
                f'pipeline: chunks = {chunks}: "{name}" needs 2 or more; with 1 it is the schedule "1f1b".'
            )
        if name == "interleaved" and micro_batches % stages:
            near = [n for n in (micro_batches // stages * stages, -(-micro_batches // stages) * stages) if n]
            raise ScheduleError(
                f'pipeline: micro_batches = {micro_batches}: "interleaved" needs a multiple of the {stages} stages: '
                f"{' or '.join(map(str, near))}."
            )
    elif chunks not in (0, default_chunks(name)):
        raise ScheduleError(
            f'pipeline: chunks = {chunks}: "{name}" has {default_chunks(name)}; "interleaved", "gis" and '
            '"gis_min" take other numbers.'
        )


def _gpipe(p: int, m: int, v: int) -> Schedule:
    """GPipe: all forward, then all backward (arXiv:1811.06965)."""
    order = (*(PipelineOp("F", i, 0) for i in range(m)), *(PipelineOp("B", i, 0) for i in range(m)))
    return Schedule("gpipe", p, m, v, split=False, vee=False, orders=(order,) * p)


def _one_f_one_b(p: int, m: int, v: int) -> Schedule:
    """1F1B: one forward, one backward, after a forward for each later stage (arXiv:1806.03377, 2006.09503)."""
    return Schedule("1f1b", p, m, v, split=False, vee=False, orders=_alternating(p, m, [p - 1 - s for s in range(p)]))


def _alternating(p: int, m: int, warm: Sequence[int]) -> tuple[tuple[PipelineOp, ...], ...]:
    """Warm-up of ``warm[s]`` forward operations, then forward and backward in turn, then the remaining backwards."""
    orders = []
    for s in range(p):
        ahead = min(m, warm[s])
        pairs = itertools.chain.from_iterable(
            (PipelineOp("F", ahead + i, 0), PipelineOp("B", i, 0)) for i in range(m - ahead)
        )
        first = [PipelineOp("F", i, 0) for i in range(ahead)]
        orders.append((*first, *pairs, *(PipelineOp("B", i, 0) for i in range(m - ahead, m))))
    return tuple(orders)


def _interleaved(p: int, m: int, v: int) -> Schedule:
    """Interleaved 1F1B: several chunks per stage, micro-batches in groups of ``p`` (arXiv:2104.04473, section 2.2)."""

    def sequence(kind: Kind) -> list[PipelineOp]:
        chunks = range(v) if kind == "F" else range(v - 1, -1, -1)
        return [PipelineOp(kind, g + i, c) for g in range(0, m, p) for c in chunks for i in range(p)]

    forward, backward = sequence("F"), sequence("B")
    orders = []
    for s in range(p):
        warm = min(m * v, 2 * (p - 1 - s) + (v - 1) * p)
        steady = itertools.chain.from_iterable(zip(forward[warm:], backward, strict=False))
        orders.append((*forward[:warm], *steady, *backward[m * v - warm :]))
    return Schedule("interleaved", p, m, v, split=False, vee=False, orders=tuple(orders))


def _zero_bubble(name: str, p: int, m: int, *, warm: int, room: int) -> Schedule:
    """Zero bubble: early forwards, backwards first, weight gradients in idle time (arXiv:2401.10241, section 3).

    Args:
        warm: forward operations of the first stage before its first backward one.
        room: micro-batches of activations that a stage may hold.
    """
    fewer = 1 if name == "zb_h1" else 2
    orders = _alternating(p, m, [max(0, warm - 1 - fewer * s) for s in range(p)])
    return Schedule(name, p, m, 1, split=True, vee=False, orders=fill(p, m, 1, False, orders, [room] * p))


def _zero_bubble_vee(p: int, m: int, v: int) -> Schedule:
    """ZB-V: zero bubble with the memory of 1F1B, from 2p-1 micro-batches on (arXiv:2401.10241, section 6; 2405.15362).

    A stage begins with as many first chunks as the first micro-batch takes to go down and up again, less those that it
    computes meanwhile; then both chunks alternate, forward and backward.
    """
    down, up, up_back, down_back = _HOPS
    orders = []
    for s in range(p):
        hops = [down] * (2 * (p - s) - 1) + [up, down] * s + [up, up_back] * (p - s)
        hops += [down, down_back, up, up_back] * m
        numbers = {hop: itertools.count() for hop in _HOPS}
        numbered = ((hop, next(numbers[hop])) for hop in hops)
        orders.append(tuple(PipelineOp(kind, i, chunk) for (kind, chunk), i in numbered if i < m))
    return Schedule("v_zb", p, m, v, split=True, vee=True, orders=fill(p, m, v, True, tuple(orders), [2 * p] * p))


# Delay from stage to stage, in durations of one operation: forward down, forward up, backward down, backward up.
DELAYS = {"v_min": (1, 1, 1, 1), "v_half": (2, 1, 2, 1)}
PERIOD = 6
"""Operations of a micro-batch on a stage: three for each of two chunks."""


def peak_of_vee(name: str, stages: int) -> int:
    """Peak of a stage's saved activations in V-shaped schedules, in micro-batches (arXiv:2405.15362)."""
    return {"v_min": (stages + 4) // 3, "v_half": (stages + 2) // 2, "v_zb": stages}[name]


def _vee(name: str, p: int, m: int, v: int) -> Schedule:
    """V-shaped schedule: a building block that is repeated for each micro-batch, then compacted (arXiv:2405.15362).

    The first chunks go down the stages and the second ones up, so that each stage holds the activations of one chunk
    for long and of the other for a short time, and all stages have the same peak.
    """
    times = _block(name, p)
    orders = []
    for s in range(p):
        placed = [
            (times[s][k] + PERIOD * i, PipelineOp(kind, i, c)) for k, (kind, c) in enumerate(_HOPS) for i in range(m)
        ]
        orders.append(tuple(op for _, op in sorted(placed)))
    room = [2 * peak_of_vee(name, p)] * p
    return Schedule(name, p, m, v, split=True, vee=True, orders=fill(p, m, v, True, tuple(orders), room))


_HOPS: tuple[tuple[Kind, int], ...] = (("F", 0), ("F", 1), ("B", 1), ("B", 0))


@functools.lru_cache
def _block(name: str, p: int) -> tuple[tuple[int, ...], ...]:
    """Start times of F0, F1, B1, B0 of the first micro-batch on each stage: the tightest without collisions."""
    down, up, back_down, back_up = DELAYS[name]
    best: tuple[tuple[int, ...], ...] | None = None
    for turns in sorted(itertools.product(range(1, PERIOD + 1), repeat=3), key=lambda t: (sum(t), t)):
        first_up = down * (p - 1) + turns[0]
        first_back = first_up + up * (p - 1) + turns[1]
        first_home = first_back + back_down * (p - 1) + turns[2]
        best = tuple(
            (down * s, first_up + up * (p - 1 - s), first_back + back_down * s, first_home + back_up * (p - 1 - s))
            for s in range(p)
        )
        if all(len({t % PERIOD for t in row}) == len(row) for row in best):
            return best
    raise ScheduleError(f"{name}: no building block for {p} stages.")


def fill(
    p: int, m: int, v: int, vee: bool, orders: tuple[tuple[PipelineOp, ...], ...], room: Sequence[int]
) -> tuple[tuple[PipelineOp, ...], ...]:
    """Orders of F and B with every W inserted where the next F or B is not ready, or has no memory.

    Args:
        room: chunks of activations that each stage may hold.
    """
    bare = Schedule("", p, m, v, split=True, vee=vee, orders=orders)
    done: dict[tuple[int, PipelineOp], int] = {}
    out: list[list[PipelineOp]] = [[] for _ in range(p)]
    place, held = [0] * p, [0] * p
    waiting: list[list[PipelineOp]] = [[] for _ in range(p)]
    time = 0
    while any(len(row) < 3 * m * v for row in out):
        busy = False
        for s in range(p):
            op = orders[s][place[s]] if place[s] < len(orders[s]) else None
            ready = op is not None and all(done.get(need, time + 1) <= time for need in bare.needs(s, op))
            if op is not None and ready and (op.kind == "B" or held[s] < room[s]):
                place[s] += 1
                held[s] += op.kind == "F"
                if op.kind == "B":
                    waiting[s].append(PipelineOp("W", op.micro, op.chunk))
            elif waiting[s]:
                op = waiting[s].pop(0)
                held[s] -= 1
            else:
                continue
            busy = True
            out[s].append(op)
            done[s, op] = time + 1
        time += 1
        if not busy and time > max(done.values(), default=0):
            raise ScheduleError(f"a stage needs memory for more than {room[0]} chunks of activations in these orders.")
    return tuple(tuple(row) for row in out)
