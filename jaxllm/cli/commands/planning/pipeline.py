"""``jaxllm pipeline``: timeline, bubble and activation memory of pipeline schedules."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from jaxllm.cli.command_parser import parse_command
from jaxllm.parallel.pipeline.offload_simulation import offload_table, simulate_offload
from jaxllm.parallel.pipeline.schedule import OpCosts, Schedule, ScheduleError
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
        offload: float | None = None,
        room: float | None = None,
        png: Path | None = None,
        width: int = 160,
    ) -> int:
        """Draws a pipeline schedule as text, with its bubble and the activations held per stage.

        Args:
            name: gpipe, 1f1b, interleaved, gis, gis_min, zb_h1, zb_h2, v_min, v_half or v_zb; "all" compares them.
            stages: number of pipeline stages (devices).
            micro_batches: number of micro-batches per step.
            chunks: virtual stages per stage, for "interleaved", "gis" and "gis_min"; 0 for the schedule's own number.
            costs: time of a stage's forward pass, of its backward pass for the input, and for the weights.
            offload: time to copy the activations of a stage's micro-batch to its host, in the unit of ``costs``: prints
                what each stage holds with activation offload.
            room: with --offload, micro-batches that a stage may hold with selective offload; by default half the peak.
            png: image file to draw the schedule to.
            width: maximum line width in characters.
        """
        if min(costs) <= 0:
            raise ScheduleError(f"costs = {costs}; give three positive times.")
        times = OpCosts(*costs)
        if room is not None and offload is None:
            raise ScheduleError("--room is for selective offload; give --offload TIME too.")

        def offloaded(schedule: Schedule) -> str:
            return "" if offload is None else "\n" + offload_table(simulate_offload(schedule, offload, room, times))

        if name != "all":
            schedule = make(name, stages, micro_batches, chunks)
            print(text(schedule, times, width=width) + offloaded(schedule))
            if png is not None:
                draw(schedule, png, times)
                print(f"drawn: {png}")
            return 0
        if png is not None or chunks:
            raise ScheduleError("--png and --chunks are for one schedule: name it.")
        for each in NAMES:
            try:
                schedule = make(each, stages, micro_batches)
                print(facts(schedule, times) + offloaded(schedule) + "\n")
            except ScheduleError as error:
                print(f"{each}: {error}\n")
        return 0

    return parse_command(run, argv, "jaxllm pipeline")
