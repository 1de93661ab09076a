"""Arguments of the commands that plan serving: the model to serve, the devices, and their prices."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from jaxllm.cli.errors import UsageError
from jaxllm.cli.recipe_arguments import find_recipe, recipes

if TYPE_CHECKING:
    from jaxllm.models import DecoderConfig
    from jaxllm.plan.hardware import Cluster, Hardware


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
    from jaxllm.simulate.deployment_search import platforms

    out: list[Cluster] = []
    for name in text.split(",") if text else table:
        kind = name.strip().lower()
        out += platforms(table[kind]) if kind in table else [cluster_of(name, table)]
    return out
