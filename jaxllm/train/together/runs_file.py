"""Runs file: the runs that are trained together, each as its differences from one run; and what may differ."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxllm.config import ConfigError, differences, from_dict, to_dict
from jaxllm.train.config import RunConfig

MAY_DIFFER = ("name", "seed", "data", "optim", "spikes")
"""Settings in which runs that are trained together may differ, with the settings in them; kinds of runs have more."""
SHAPES = ("data.batch_size", "data.seq_len")
"""Settings in these that they share."""


def read_runs(config: RunConfig, file: Path) -> tuple[RunConfig, ...]:
    """Runs of a TOML file: a table for each, by name, with the settings in which it differs from ``config``.

    A run's name is that of ``config`` and the table's, such as ``sft_smollm2-slow`` of the table ``[slow]``.

    Raises:
        ConfigError: the file cannot be read, a setting is unknown, or runs differ in what they must share.
    """
    try:
        tables = tomllib.loads(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"the runs file {file} cannot be read: {error}.") from error
    if loose := [name for name, value in tables.items() if not isinstance(value, dict)]:
        raise ConfigError(f"{file}: {loose[0]} belongs to no run; write it below the run's name, such as [slow].")
    runs = []
    for name, settings in tables.items():
        whole = from_dict(type(config), _merged(to_dict(config), settings), f"{file}, [{name}]")
        if whole.name != config.name:
            raise ConfigError(f"{file}, [{name}]: the table's name is the run's; leave out name = {whole.name!r}.")
        runs.append(replace(whole, name=f"{config.name}-{name}"))
    check_alike(runs)
    return tuple(runs)


def may_differ(config: RunConfig) -> tuple[str, ...]:
    """Settings in which runs of this kind may differ when they are trained together."""
    return MAY_DIFFER + config.own_together


def check_alike(runs: Sequence[RunConfig]) -> None:
    """Checks that runs can be trained together: several, with names of their own, alike but for ``may_differ``.

    Raises:
        ConfigError: names the runs, the setting, and the settings that may differ.
    """
    if len(runs) < 2:
        raise ConfigError(f"{len(runs)} run is given to train together; give two or more, or train it alone.")
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        raise ConfigError(f"runs that are trained together have the names {', '.join(names)}; give each its own.")
    first, own = runs[0], may_differ(runs[0])
    for run in runs[1:]:
        for found in differences(first, run):
            if found.path in SHAPES or found.path.split(".")[0] not in own:
                raise ConfigError(
                    f"{first.name} and {run.name} are trained together and differ in {found}. They share one step, and "
                    f"may differ in {', '.join(own)} alone, but not in {', '.join(SHAPES)}. Set it for "
                    "both, or train them one after the other."
                )


def _merged(settings: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with those of ``own`` in place of theirs; tables are merged."""
    merged = dict(settings)
    for name, value in own.items():
        old = settings.get(name)
        merged[name] = _merged(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return merged
