"""The command ``compile``: what a recipe's step takes on devices that are not here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from jaxllm.cli import configure, find_recipe, split_settings

if TYPE_CHECKING:
    from jaxllm.train import RunConfig
    from sharding.isolate import OutOfDeviceMemory, Progress
    from sharding.topology import Topology


def compile(argv: list[str]) -> int:
    """Compile a step for a pod that is not here: `jaxllm compile RECIPE --on v6e:8x8`."""

    def run(recipe: Annotated[str, tyro.conf.Positional], /, on: str, save: Path | None = None) -> int:
        """Memory of a device, what it sends, and the compiler's estimate of its work; no device is needed.

        Any setting of the run can follow, as for `jaxllm train`: --mesh, --model.layers, ... The exit status is 1
        where the step does not fit.

        Args:
            recipe: its name, or FILE.py:FUNCTION.
            on: a topology, such as v6e:8x8, 4*v6e:16x16 or h100:4x8.
            save: also write the report there, as JSON.
        """
        from jaxllm.files import write_json
        from jaxllm.train.compile import compile_for
        from sharding.isolate import OutOfDeviceMemory
        from sharding.topology import Topology

        config, topology = configure(find_recipe(recipe), settings, prog=f"jaxllm compile {recipe}"), Topology.parse(on)
        try:
            report = compile_for(config, on, progress=_progress())
        except OutOfDeviceMemory as error:
            print(_over(config, topology, error))
            return 1
        print(report)
        if save is not None:
            write_json(save, report.to_json())
            print(f"saved: {save}")
        return 0 if report.fits else 1

    # What is not this command's is the run's.
    known, settings = split_settings(argv, ("--on", "--save"), ("--help", "-h"))
    return tyro.cli(run, args=known, prog="jaxllm compile")


def _progress() -> Progress | None:
    """A line that says how far it is, for people who watch."""
    if not sys.stderr.isatty():
        return None

    def show(seconds: float, stage: str) -> None:
        end = "\r\x1b[K" if stage == "done" else ""
        print(f"\r\x1b[K{stage}, {seconds:.0f} s{end}", end="", file=sys.stderr, flush=True)

    return show


def _over(config: RunConfig, topology: Topology, error: OutOfDeviceMemory) -> str:
    """What a step takes that the compiler refused for its size, as far as that is known without it."""
    from jaxllm.parallel.table import device_bytes
    from jaxllm.train.shard import sharding_table

    table = sharding_table(config, topology.num_devices)
    parts = {
        "parameters": device_bytes(table.parameters),
        "optimizer's state": device_bytes(table.optimizer),
    }
    parts["all else: gradients, activations, the batch"] = error.need - sum(parts.values())
    rows = [*parts.items(), ("needed", error.need), ("there is", error.limit), ("too much", error.need - error.limit)]
    lines = [f"{config.name} does not fit {topology}, GiB of one device"]
    lines += [f"  {label:<44}{size / 2**30:10.3f}" for label, size in rows]
    hint = "Split it over more devices, make the micro-batch smaller (--accumulate), or recompute more (--model.remat)."
    return "\n".join([*lines, hint])
