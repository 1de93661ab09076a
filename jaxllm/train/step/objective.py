"""Objective table: the training objectives that a run can choose from, by name.

``objective_base`` has the classes that an objective derives from; ``jaxllm.train.objectives`` has the preference and
policy objectives.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from jaxllm.config import ConfigError, closest, from_dict
from jaxllm.train.objectives.actor_critic import ActorCriticObjective
from jaxllm.train.objectives.kto import KTO
from jaxllm.train.objectives.objective_base import TOKENS as TOKENS
from jaxllm.train.objectives.objective_base import CrossEntropyObjective as CrossEntropyObjective
from jaxllm.train.objectives.objective_base import HeadObjective as HeadObjective
from jaxllm.train.objectives.objective_base import LossSums as LossSums
from jaxllm.train.objectives.objective_base import Objective as Objective
from jaxllm.train.objectives.objective_base import sharded_loss_sums as sharded_loss_sums
from jaxllm.train.objectives.objective_base import sharded_token_logprobs as sharded_token_logprobs
from jaxllm.train.objectives.policy_loss import PolicyObjective
from jaxllm.train.objectives.preference_losses import DPO, IPO, ORPO, BradleyTerry, SimPO

OBJECTIVES: dict[str, type[Objective]] = {
    "cross_entropy": CrossEntropyObjective,
    "dpo": DPO,
    "ipo": IPO,
    "kto": KTO,
    "orpo": ORPO,
    "simpo": SimPO,
    "reward_model": BradleyTerry,
    "policy": PolicyObjective,
    "actor_critic": ActorCriticObjective,
}
"""Objective table: name -> class. A row may be added from outside the package."""


@dataclass(frozen=True)
class ObjectiveConfig:
    """Choice of the training objective.

    Attributes:
        name: a row of ``jaxllm.train.step.objective.OBJECTIVES``.
        options: "NAME=VALUE", fields of that objective; its defaults otherwise.
    """

    name: str = "cross_entropy"
    options: tuple[str, ...] = ()


def make_objective(config: ObjectiveConfig, z_loss: float = 0.0) -> Objective:
    """Objective of a run.

    Args:
        config: the choice.
        z_loss: ``RunConfig.z_loss``, for objectives that have a z-loss.

    Raises:
        ConfigError: there is no such objective or option, or the value is of the wrong type; says what is legal.
    """
    if (kind := OBJECTIVES.get(config.name)) is None:
        raise ConfigError(
            f"objective.name = {config.name!r}; legal: {', '.join(OBJECTIVES)}.{closest(config.name, OBJECTIVES)}"
        )
    values: dict[str, Any] = {}
    for option in config.options:
        name, equals, value = option.partition("=")
        if not equals:
            raise ConfigError(f'objective.options: {option!r} has no value; give "NAME=VALUE".')
        values[name] = _parsed(value)
    if z_loss:
        if "z_loss" not in {field.name for field in dataclasses.fields(kind)}:  # type: ignore[arg-type]
            raise ConfigError(
                f'z_loss = {z_loss}, but objective.name = "{config.name}" has no z-loss; set z_loss to 0.'
            )
        values["z_loss"] = z_loss
    return from_dict(kind, values, "objective.options")


def _parsed(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value
