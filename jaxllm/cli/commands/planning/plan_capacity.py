"""``jaxllm plan --capacity``: which places for a run's state and activations fit devices, their hosts and disks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from jaxllm.cli.command_parser import check_outputs, parse_command
from jaxllm.cli.errors import UsageError
from jaxllm.cli.memory_budget import size_of
from jaxllm.cli.recipe_arguments import configure, find_recipe, split_settings

if TYPE_CHECKING:
    from jaxllm.plan.capacity_table import CapacityRow
    from jaxllm.plan.formulas.tier_bytes import TierBytes
    from jaxllm.plan.hardware import Cluster

VALUES = ("--on", "--within", "--host", "--disk", "--explain", "--hardware", "--json")
BARE = ("--compile", "--no-compile", "--help", "-h")


def plan_capacity(argv: list[str]) -> int:
    """Show which places fit: `jaxllm plan RECIPE --capacity --on h100:1x8 --host 256GiB --disk 4TiB`."""

    def run(
        recipe: Annotated[str, tyro.conf.Positional],
        /,
        on: str,
        within: str = "",
        host: str = "",
        disk: str = "",
        explain: int | None = None,
        compile: bool = False,
        hardware: Path | None = None,
        json: Path | None = None,
    ) -> int:
        """Lists the bytes of a device by tier for each place that training has, and whether they fit; by formula.

        Any setting of the run can follow, as for `jaxllm train`: --mesh, --data.batch-size, --accumulate,
        --disk.window, ... The exit status is 1 if nothing fits for one of the recipes, with --compile as compiled.

        Args:
            recipe: name of the recipe, or FILE.py:FUNCTION, or several separated by commas.
            on: topology, such as v6e:8x8 or h100:1x8.
            within: memory of a device, such as 24GiB; by default what the kind of device has for a step.
            host: memory of the host for each device, such as 128GiB; by default none.
            disk: disk for each device, such as 2TiB; by default none.
            explain: number of a place whose bytes to show by what they are: parameters, gradients, ...
            compile: compile the programs of that place, or without --explain of the places that fit, in their order,
                until one fits as compiled too; shows the compiler's bytes beside the predicted ones.
            hardware: TOML or JSON file that changes or adds kinds of hardware.
            json: JSON file to write the table to.
        """
        from jaxllm.files import write_json
        from jaxllm.plan import hardware as table
        from jaxllm.plan.capacity_table import PLACEMENTS, capacity_table
        from jaxllm.plan.formulas.device_work import leaves_of
        from jaxllm.plan.formulas.tier_bytes import TierBytes
        from jaxllm.plan.hardware import Cluster
        from jaxllm.plan.layout_search import memory_limit

        if explain is not None and not 1 <= explain <= len(PLACEMENTS):
            raise UsageError(f"--explain {explain}: give the number of a place, 1 to {len(PLACEMENTS)}.")
        check_outputs(json=json)
        cluster = Cluster.parse(on, table.TABLE if hardware is None else table.read(hardware))
        device = size_of("--within", within) if within else memory_limit(cluster)
        available = TierBytes(device, size_of("--host", host) if host else 0, size_of("--disk", disk) if disk else 0)
        found, status = [], 0
        for number, name in enumerate(recipe.split(",")):
            config = configure(find_recipe(name), settings, prog=f"jaxllm plan {name} --capacity")
            if config.disk.directory or config.host.optimizer or config.host.params:
                raise UsageError(
                    f"{config.name} says where its states are (host, disk.directory), which the table has all places "
                    "of; leave it out."
                )
            if any(word.partition("=")[0] == "--model.remat" for word in settings):
                raise UsageError(
                    "--model.remat: the table has the remat that saves least, full, and offload:0; leave it out."
                )
            rows = capacity_table(config, cluster, available)
            billions = sum(math.prod(leaf.shape) for leaf in leaves_of(config.model)) / 1e9
            print(
                ("\n" if number else "")
                + f"{config.name}: {billions:.3g} B parameters, mesh {config.mesh} on {cluster.name}, "
                f"{config.data.batch_size} rows of {config.data.seq_len:,}; GiB of a device, predicted\n"
            )
            print(_shown(rows, available), flush=True)
            fits = any(row.fits for row in rows)
            chosen = [(n, row) for n, row in enumerate(rows, 1) if (row.fits if explain is None else n == explain)]
            compiled: dict[int, dict[str, object]] = {}
            if explain is not None or compile:
                fits &= _explained(chosen, available, cluster, compiled, compile=compile)
            status |= not fits
            found += [_as_json(config.name, row) | {"compiled": compiled.get(n)} for n, row in enumerate(rows, 1)]
        print("\nsettings of `jaxllm train`, with --model.remat full unless they name another:")
        for number, place in enumerate(PLACEMENTS, 1):
            print(f"{number}  {place.options or 'the default'}")
        if json is not None:
            write_json(json, {"available": available._asdict(), "rows": found})
            print(f"saved: {json}")
        return status

    known, settings = split_settings(argv, VALUES, BARE)
    return parse_command(run, known, "jaxllm plan --capacity")


def _shown(rows: list[CapacityRow], available: TierBytes) -> str:
    """Text table of places, bytes and what is lacking; below it what is refused."""
    from jaxllm.parallel.sharding_table_view import columns

    shown, notes = [], []
    for number, row in enumerate(rows, 1):
        place = row.place.placement
        where = (place.parameters, place.optimizer, place.activations)
        sizes = ("", "", "") if row.bytes is None else tuple(f"{size / 2**30:,.1f}" for size in row.bytes)
        window = row.run.disk.window
        fits = "fits" if window == rows[0].run.disk.window else f"fits with --disk.window {window}"
        said = fits if row.fits else "refused" if row.refusal else f"needs {_lacks(row.lacking)}"
        shown.append((str(number), *where, *sizes, said))
        notes += [f"{number}: {row.refusal}"] if row.refusal else []
    sizes = tuple(f"{name} of {size / 2**30:,.1f}" for name, size in available._asdict().items())
    head = ("", "parameters", "optimizer", "activations", *sizes, "")
    return "\n".join([columns(head, shown, "><<<>>><"), *notes])


def _lacks(lacking: Mapping[str, float]) -> str:
    """Says how much is missing of each tier."""
    return ", ".join(f"{size / 2**30:,.1f} more {_NAMES[tier]}" for tier, size in lacking.items())


def _explained(
    rows: list[tuple[int, CapacityRow]],
    available: TierBytes,
    cluster: Cluster,
    found: dict[int, dict[str, object]],
    *,
    compile: bool,
) -> bool:
    """Prints bytes by kind of places, and compiles them until one fits; returns whether the last one does.

    Args:
        rows: places by number.
        available: bytes of a device.
        cluster: devices.
        found: compiled bytes are added, by number.
        compile: whether to compile; else the bytes of all places are printed.
    """
    from jaxllm.cli.progress_line import progress_line
    from jaxllm.config import ConfigError
    from jaxllm.plan.capacity_table import compiled_bytes
    from sharding.isolate import OutOfDeviceMemory

    fits = False
    for number, row in rows:
        if row.kinds is None:
            print(f"\nplace {number} is refused: {row.refusal}")
            continue
        if not compile:
            print(f"\n{_by_kind(number, row)}")
            fits = row.fits
            continue
        try:
            took, memory = compiled_bytes(row, cluster, progress_line(f"place {number}: "))
        except (ConfigError, OutOfDeviceMemory) as error:
            print(f"\n{_by_kind(number, row)}\nnot compiled: {error}")
            continue
        found[number] = {**took._asdict(), "temporaries": memory.temporaries, "programs": memory.programs}
        print(f"\n{_by_kind(number, row, took)}")
        if len(memory.programs) > 1:
            each = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in memory.programs.items())
            print(f"each program by itself, GiB of the device: {each}")
            print(f"of it temporaries, at most: {memory.temporaries / 2**30:.2f}")
        if cluster.hardware.like != cluster.hardware.name:
            print(f"compiled for {cluster.topology.name}: no compiler has {cluster.hardware.name} without one")
        lacking = took.lacking(available)
        if fits := not lacking:
            break
        print(f"as compiled it needs {_lacks(lacking)}")
    return fits


def _by_kind(number: int, row: CapacityRow, compiled: TierBytes | None = None) -> str:
    """Table of bytes by kind and tier, with those of the compiled step below."""
    from jaxllm.parallel.sharding_table_view import columns

    assert row.kinds is not None
    assert row.bytes is not None
    shown = {**row.kinds, "in all": row.bytes} | ({} if compiled is None else {"as compiled": compiled})
    rows = [(name, *(f"{size / 2**30:,.2f}" if size else "" for size in sizes)) for name, sizes in shown.items()]
    return columns((f"place {number}, GiB", "device", "host", "disk"), rows, "<>>>")


_NAMES = {"device": "on the device", "host": "of the host", "disk": "on disk"}


def _as_json(name: str, row: CapacityRow) -> dict[str, object]:
    place = row.place.placement
    return {
        "run": name, "options": row.place.options, "parameters": place.parameters, "optimizer": place.optimizer,
        "activations": place.activations, "fits": row.fits, "refusal": row.refusal,
        "bytes": None if row.bytes is None else row.bytes._asdict(), "window": row.run.disk.window,
        "kinds": None if row.kinds is None else {kind: sizes._asdict() for kind, sizes in row.kinds.items()},
    }  # fmt: skip
