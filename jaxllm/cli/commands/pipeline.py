"""The command ``pipeline``: what a schedule does, when, and what it holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from jaxllm.parallel.pipeline.schedule import Costs, ScheduleError
from jaxllm.parallel.pipeline.schedule_generators import NAMES, make
from jaxllm.parallel.pipeline.schedule_view import draw, facts, text


def pipeline(argv: list[str]) -> int:
    """Show pipeline schedules: `jaxllm pipeline 1f1b --stages 4 --micro-batches 8`."""

    def run(
        name: Annotated[str, tyro.conf.Positional] = "all",
        /,
        stages: int = 4,
        micro_batches: int = 8,
        chunks: int = 0,
        costs: tuple[float, float, float] = (1.0, 1.0, 1.0),
        png: Path | None = None,
        width: int = 160,
    ) -> int:
        """A schedule as a picture, its bubble and the activations that it holds.

        Args:
            name: gpipe, 1f1b, interleaved, zb_h1, zb_h2, v_min, v_half or v_zb; "all" compares them.
            stages: devices along the pipeline.
            micro_batches: of a step.
            chunks: virtual stages of a stage, for "interleaved"; 0 for the schedule's own number.
            costs: time of a stage's forward pass, of its backward pass for the input, and for the weights.
            png: also draw it here.
            width: characters of a line at most.
        """
        if min(costs) <= 0:
            raise ScheduleError(f"costs = {costs}; give three positive times.")
        times = Costs(*costs)
        if name != "all":
            schedule = make(name, stages, micro_batches, chunks)
            print(text(schedule, times, width=width))
            if png is not None:
                draw(schedule, png, times)
                print(f"drawn: {png}")
            return 0
        if png is not None or chunks:
            raise ScheduleError("--png and --chunks are for one schedule: name it.")
        for each in NAMES:
            try:
                print(facts(make(each, stages, micro_batches), times) + "\n")
            except ScheduleError as error:
                print(f"{each}: {error}\n")
        return 0

    return tyro.cli(run, args=argv, prog="jaxllm pipeline")
