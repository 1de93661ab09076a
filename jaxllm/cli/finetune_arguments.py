"""Arguments of ``jaxllm serve --finetune``: the run that is trained beside serving."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from jaxllm.cli.errors import UsageError
from jaxllm.cli.recipe_arguments import configure, find_recipe

if TYPE_CHECKING:
    from jaxllm.train import RunConfig


def finetune_config(name: str, settings: tuple[str, ...], model: str) -> RunConfig:
    """Configuration of a run beside serving.

    Args:
        name: directory of a run, which is resumed, or a recipe as for ``jaxllm train``.
        settings: "NAME=VALUE", settings of the run.
        model: model that is served: the base of the run.

    Raises:
        UsageError: there is no such run or recipe, a setting is unknown, or the run adapts another model.
    """
    from jaxllm.config import from_dict
    from jaxllm.hub import find_model
    from jaxllm.train import RunConfig

    for setting in settings:
        if "=" not in setting:
            raise UsageError(f"--finetune-set {setting}: write NAME=VALUE, such as adapter.kind=lora.")
    argv = [f"--{setting}" for setting in settings]
    directory = Path(name).expanduser()
    if (directory / "checkpoints").is_dir():
        stored = from_dict(RunConfig, json.loads((directory / "config.json").read_text("utf-8")), name)
        found = replace(stored, name=directory.name, out=str(directory.parent))
        config = configure(lambda: found, argv, prog="jaxllm serve --finetune")
    else:
        config = configure(find_recipe(name), argv, prog="jaxllm serve --finetune")
    config = replace(config, init_from=config.init_from or model)
    if find_model(config.init_from).resolve() != find_model(model).resolve():
        raise UsageError(
            f"--finetune {name}: the run adapts init_from = {config.init_from!r}, and the server has {model!r}; serve "
            f"that model, or give --finetune-set init_from={model}."
        )
    return config
