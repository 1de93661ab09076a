"""``jaxllm shard``: sharding of each parameter of a recipe, computed without devices."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Annotated

import tyro

from jaxllm.cli.command_parser import parse_command
from jaxllm.cli.errors import UsageError
from jaxllm.cli.recipe_arguments import configure, find_recipe, split_settings


def shard(argv: list[str]) -> int:
    """Show how a run is sharded: `jaxllm shard RECIPE --mesh fsdp=4,tensor=2`."""

    def run(
        recipe: Annotated[str, tyro.conf.Positional],
        /,
        on: str | None = None,
        devices: int | None = None,
        json: bool = False,
    ) -> int:
        """Prints each parameter's sharding and bytes per device, and totals. No device is needed, nothing is allocated.

        Any setting of the run can follow, as for `jaxllm train`: --mesh, --model.layers, ...

        Args:
            recipe: name of the recipe, or FILE.py:FUNCTION.
            on: topology, such as v6e:8x8 or h100:4x8: also prints bytes by class of link, and what they cost.
            devices: number of devices; by default the product of the mesh's sizes, or the devices of this machine.
            json: print JSON.
        """
        from jaxllm.parallel.sharding_table_view import text
        from jaxllm.plan import link_traffic
        from jaxllm.plan.hardware import Cluster
        from jaxllm.train.run_sharding import described_mesh, sharding_table
        from sharding import MeshSpec
        from sharding.topology import Topology

        config = configure(find_recipe(recipe), settings, prog=f"jaxllm shard {recipe}")
        sizes = [size for _, size in MeshSpec.parse(config.mesh).axes]
        if on is not None and devices is not None:
            raise UsageError(f"--on {on} sets the number of devices; leave out --devices.")
        topology = None if on is None else Topology.parse(on)
        if topology is not None:
            devices = topology.num_devices
        elif devices is None and -1 not in sizes:
            devices = math.prod(sizes)
        elif devices is None:
            import jax

            devices = jax.device_count()
        table = sharding_table(config, devices, topology)
        links, said = [], ""
        if on is not None and topology is not None and topology.platform != "cpu":
            cluster = Cluster.parse(on)
            links = link_traffic.traffic_of_choices(config, described_mesh(config, devices, topology), cluster)
            said = f"\n\n{link_traffic.text(links, cluster)}"
        if json:
            from json import dumps

            print(dumps(table.to_json() | {"links": [asdict(one) for one in links]}, indent=1))
        else:
            print(text(table) + said)
        return 0

    # All other options are settings of the run.
    known, settings = split_settings(argv, ("--on", "--devices"), ("--json", "--no-json", "--help", "-h"))
    return parse_command(run, known, "jaxllm shard")
