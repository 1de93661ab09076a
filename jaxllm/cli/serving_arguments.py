"""Arguments of the commands that plan serving: the model to serve, the devices, and their prices."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from jaxllm.cli.errors import UsageError
from jaxllm.cli.recipe_arguments import find_recipe, recipes

if TYPE_CHECKING:
    from jaxllm.infer.pools.pool_argument import PoolSizes
    from jaxllm.models import DecoderConfig
    from jaxllm.plan.hardware import Cluster, Hardware
    from jaxllm.simulate import Deployment
    from jaxllm.simulate.pools import DisaggregatedPools


def served_model(name: str) -> tuple[DecoderConfig, int | None]:
    """Architecture of a model by name, in bfloat16, and the sequence length it was trained on, if that is known.

    No weights are read: a name is a recipe's, ``FILE.py:FUNCTION``, a ``config.json``, or a model as for
    ``jaxllm generate``.

    Raises:
        UsageError: there is no such model; says what is legal.
    """
    from jaxllm.files import read_json
    from jaxllm.hub import find_model, open_source
    from jaxllm.hub.families.families import decoder_config
    from jaxllm.hub.model_source import hub_hint

    if name in recipes() or name.partition(":")[0].endswith(".py"):
        run = find_recipe(name)()
        config, longest = run.model, run.data.seq_len
    elif name.endswith(".json") and Path(name).is_file():
        given = read_json(Path(name))
        config, longest = decoder_config(given), given.get("max_position_embeddings")
    elif Path(name).expanduser().exists() or name.startswith("hf:") or name == "smollm2":
        source = open_source(find_model(name))
        config, longest = source.config, source.source.get("max_position_embeddings")
    else:
        raise UsageError(
            f"no model {name!r}. Legal: a recipe ({', '.join(sorted(recipes()))}), FILE.py:FUNCTION, a config.json of "
            f"Hugging Face, or a model's directory or file.{hub_hint(name)}"
        )
    return dataclasses.replace(config, dtype="bfloat16", param_dtype="bfloat16", remat="none"), longest


def hardware_table(file: Path | None, prices: str) -> dict[str, Hardware]:
    """Hardware table with the changes of a file and with prices such as ``h200=2.5,v6e=1.2`` in dollars an hour.

    Raises:
        UsageError: a price is malformed or of a device kind that is not in the table.
        HardwareError: the file is illegal.
    """
    from jaxllm.plan import hardware

    table = dict(hardware.TABLE) if file is None else hardware.read(file)
    for part in filter(None, prices.split(",")):
        name, _, value = part.strip().partition("=")
        try:
            price = float(value)
        except ValueError:
            price = 0.0
        if name not in table or price <= 0:
            raise UsageError(f"--price {part}: give KIND=DOLLARS an hour of one device; kinds: {', '.join(table)}.")
        table[name] = dataclasses.replace(table[name], dollars_per_hour=price)
    return table


def cluster_of(text: str, table: dict[str, Hardware]) -> Cluster:
    """Cluster of a name such as ``h200:1x8`` or ``v6e:2x4``, or of a number of devices, ``h200:8``.

    Raises:
        UsageError: there is no slice of so many devices.
        ShardingError, HardwareError: there is no such topology, or the device kind is not in the table.
    """
    from jaxllm.plan.hardware import Cluster

    kind, _, many = text.strip().lower().partition(":")
    if kind in table and many.isdigit():
        found = Cluster.sized(table[kind], int(many))
        if found is None:
            raise UsageError(f"--on {text}: {kind} has no slice of {many} devices; give a shape such as v6e:2x4.")
        return found
    return Cluster.parse(text, table)


def platforms_of(text: str, table: dict[str, Hardware]) -> list[Cluster]:
    """Clusters of names separated by commas; a kind alone stands for its clusters of 1 to 16 devices, "" for all kinds.

    Raises:
        UsageError, ShardingError, HardwareError: see ``cluster_of``.
    """
    from jaxllm.simulate.search.deployment_search import platforms

    out: list[Cluster] = []
    for name in text.split(",") if text else table:
        kind = name.strip().lower()
        out += platforms(table[kind]) if kind in table else [cluster_of(name, table)]
    return out


def _disaggregated(base: Deployment, sizes: PoolSizes) -> DisaggregatedPools:
    """Prefill and decode pools that are all devices of a deployment.

    Raises:
        UsageError: there are more devices, or fewer.
    """
    from jaxllm.simulate.pools import DisaggregatedPools
    from jaxllm.simulate.search.pool_search import engines_of

    prefill, decode = (engines_of(base, one.tensor, one.engines) for one in (sizes.prefill, sizes.decode))
    if prefill is None or decode is None or prefill.devices + decode.devices != base.devices:
        raise UsageError(
            f"--pools of {sizes.prefill.devices} and {sizes.decode.devices} devices, and --on has {base.devices} of "
            f"{base.cluster.hardware.name}: give as many, in slices that there are."
        )
    return DisaggregatedPools(prefill, decode)


def with_pools(base: Deployment, pools: str, overlap: str, mesh: str | None) -> Deployment | DisaggregatedPools:
    """Deployment of engines with an attention pool, or of prefill and decode pools, on all devices of a deployment.

    Args:
        base: its devices, model, formats and sizes are taken.
        pools: such as ``model=tensor:2, attention=tensor:4``, or ``prefill=tensor:2 x1, decode=tensor:4 x1``.
        overlap: see ``EngineConfig``.
        mesh: of the command line.

    Raises:
        UsageError: the pools are of another kind, there is a mesh too, or the devices do not divide.
        ConfigError: the text is not legal, or other settings do not go with it.
    """
    from jaxllm.infer.pools.pool_argument import AttentionPoolSizes, parse_pools
    from jaxllm.simulate.attention_split import split_of

    sizes = parse_pools(pools)
    if mesh is not None:
        raise UsageError("--pools says which devices have weights and pages; leave --mesh out.")
    if not isinstance(sizes, AttentionPoolSizes):
        if overlap != "none":
            raise UsageError(
                f"--overlap {overlap} goes with an attention pool, not with --pools {pools}: leave it out."
            )
        return _disaggregated(base, sizes)
    hardware, copies = base.cluster.hardware, base.devices // sizes.devices
    found = None
    if base.devices == copies * sizes.devices:
        base, near = base.sized(overlap=overlap), min(sizes.model, sizes.attention) * hardware.link
        found = split_of(base, hardware, sizes.model, hardware, sizes.attention, copies, axis=sizes.axis, link=near)
    if found is None:
        raise UsageError(
            f"--pools {pools}: {base.devices} devices of {hardware.name} are not made of parts of {sizes.model} and "
            f"{sizes.attention}: give --on another number, or other parts."
        )
    return found
