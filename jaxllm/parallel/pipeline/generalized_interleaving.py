"""Generalized interleaved schedules: interleaved 1F1B in groups of any size, which hold less (arXiv:2503.01328).

Chunks are placed as in interleaved 1F1B, and micro-batches come in groups. A group goes through the first chunk of all
stages, then through the second, and so on, and back. Interleaved 1F1B begins the next chunk when the group has passed
the first one as fast as it can. Here every stage has one forward and one backward operation in turn from the start, and
the next chunk begins as early as this rhythm allows:

- Groups as large as the pipeline has stages ("gis") have the bubble of interleaved 1F1B, and hold P micro-batches
  instead of (3 P - 1) / 2 with two chunks.
- Groups of one ("gis_min") have the bubble of 1F1B where a backward operation takes two forward ones or less, and hold
  about 5/6 P with two chunks. The last chunk lives for a short time: P / 4 are left where the first one is offloaded.
"""

from __future__ import annotations

from jaxllm.parallel.pipeline.schedule import PipelineOp, Schedule


def generalized_interleaved(name: str, stages: int, micro_batches: int, chunks: int, group: int) -> Schedule:
    """Generalized interleaved schedule: a block of operations of a group, repeated for each group.

    Times are in forward operations of a chunk; a backward one, which is not split, takes two. Only their order is used:
    operations then begin as early as they can.

    Args:
        name: of the schedule.
        stages: P.
        micro_batches: any number; where ``group`` does not divide it, the last group is smaller.
        chunks: virtual stages per stage.
        group: micro-batches that go through a chunk one after the other.
    """
    turns = _turns(stages, chunks, group)
    orders = []
    for stage in range(stages):
        there = stages - 1 - stage  # stages down to the last one, from which the gradient comes back at half the speed
        back = 3 * group * turns[-1] + stage + there + 1 + 2 * there
        placed = []
        for micro in range(micro_batches):
            number, member = divmod(micro, group)
            begin = 3 * (number * group * chunks + member)
            for chunk, turn in enumerate(turns):
                placed.append((begin + 3 * group * turn + stage, PipelineOp("F", micro, chunk)))
                placed.append((begin + 3 * group * turn + back, PipelineOp("B", micro, chunks - 1 - chunk)))
        orders.append(tuple(op for _, op in sorted(placed)))
    return Schedule(name, stages, micro_batches, chunks, split=False, vee=False, orders=tuple(orders))


def _turns(stages: int, chunks: int, group: int) -> list[int]:
    """Groups by which each chunk is later than the first one.

    A gradient takes two operations' time per stage, so the next chunk waits for 2 P of them. Two chunks whose turns are
    equal modulo the number of chunks would have their operations at the same time, of two groups.
    """
    turns = [0]
    while len(turns) < chunks:
        turn = turns[-1] + -(-2 * stages // (3 * group))
        while turn % chunks in {one % chunks for one in turns}:
            turn += 1
        turns.append(turn)
    return turns
