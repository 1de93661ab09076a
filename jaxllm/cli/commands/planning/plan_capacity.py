"""``jaxllm plan --capacity``: which places for a run's state and activations fit devices, their hosts and disks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from jaxllm.cli.command_parser import parse_command
from jaxllm.cli.errors import UsageError
from jaxllm.cli.memory_budget import size_of
from jaxllm.cli.recipe_arguments import configure, find_recipe, split_settings

if TYPE_CHECKING:
    from jaxllm.plan.capacity_table import CapacityRow
    from jaxllm.plan.formulas.tier_bytes import TierBytes

VALUES = ("--on", "--within", "--host", "--disk", "--hardware", "--json")
BARE = ("--help", "-h")


def plan_capacity(argv: list[str]) -> int:
    """Show which places fit: `jaxllm plan RECIPE --capacity --on h100:1x8 --host 256GiB --disk 4TiB`."""

    def run(
        recipe: Annotated[str, tyro.conf.Positional],
        /,
        on: str,
        within: str = "",
        host: str = "",
        disk: str = "",
        hardware: Path | None = None,
        json: Path | None = None,
    ) -> int:
        """Lists the bytes of a device by tier for each place that training has, and whether they fit; by formula.

        Any setting of the run can follow, as for `jaxllm train`: --mesh, --data.batch-size, --accumulate,
        --disk.window, ... The exit status is 1 if nothing fits for one of the recipes.

        Args:
            recipe: name of the recipe, or FILE.py:FUNCTION, or several separated by commas.
            on: topology, such as v6e:8x8 or h100:1x8.
            within: memory of a device, such as 24GiB; by default what the kind of device has for a step.
            host: memory of the host for each device, such as 128GiB; by default none.
            disk: disk for each device, such as 2TiB; by default none.
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
            status |= not any(row.fits for row in rows)
            found += [_as_json(config.name, row) for row in rows]
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
        lacks = ", ".join(f"{size / 2**30:,.1f} more {_NAMES[tier]}" for tier, size in row.lacking.items())
        said = "fits" if row.fits else "refused" if row.refusal else f"needs {lacks}"
        shown.append((str(number), *where, *sizes, said))
        notes += [f"{number}: {row.refusal}"] if row.refusal else []
    sizes = tuple(f"{name} of {size / 2**30:,.1f}" for name, size in available._asdict().items())
    head = ("", "parameters", "optimizer", "activations", *sizes, "")
    return "\n".join([columns(head, shown, "><<<>>><"), *notes])


_NAMES = {"device": "on the device", "host": "of the host", "disk": "on disk"}


def _as_json(name: str, row: CapacityRow) -> dict[str, object]:
    place = row.place.placement
    return {
        "run": name, "options": row.place.options, "parameters": place.parameters, "optimizer": place.optimizer,
        "activations": place.activations, "fits": row.fits, "refusal": row.refusal,
        "bytes": None if row.bytes is None else row.bytes._asdict(),
    }  # fmt: skip
