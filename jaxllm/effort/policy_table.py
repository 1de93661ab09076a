"""Table of effort policies, and policy files: a policy as JSON that loads again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxllm.config import ConfigError, closest, from_dict, to_dict
from jaxllm.effort.adaptive_best_of_k import AdaptiveBestOfK
from jaxllm.effort.best_of_n import BestOfN
from jaxllm.effort.compute_optimal import ComputeOptimal
from jaxllm.effort.effort_policy import POLICIES, EffortPolicy
from jaxllm.effort.majority import Majority
from jaxllm.effort.revision import Revision
from jaxllm.effort.sample_mixture import SampleMixture
from jaxllm.effort.selective_allocation import SelectiveAllocation
from jaxllm.effort.verifier_beam import VerifierBeam
from jaxllm.files import write_json

POLICIES[:] = [
    BestOfN,
    Majority,
    VerifierBeam,
    Revision,
    ComputeOptimal,
    AdaptiveBestOfK,
    SampleMixture,
    SelectiveAllocation,
]


def policy_names() -> list[str]:
    """Names of the policies, as policy files have them."""
    return [kind.__dataclass_fields__["policy"].default for kind in POLICIES]


def save_policy(policy: EffortPolicy, file: Path | str) -> None:
    """Writes a policy file.

    Raises:
        ConfigError: the file would not give the same policy: it has a verifier or a policy that is in no table.
    """
    try:
        data = to_dict(policy)
        same = policy_from_dict(data) == policy
    except (ConfigError, TypeError) as error:
        raise ConfigError(
            f"this policy cannot be saved: {error}. A policy file holds rows of POLICIES and VERIFIERS only; a "
            "verifier of your own is for Python."
        ) from None
    assert same, "a policy whose JSON is legal equals itself"
    write_json(Path(file), data)


def load_policy(file: Path | str) -> EffortPolicy:
    """Policy of a policy file.

    Raises:
        ConfigError: the file cannot be read, or is not a policy; says what and where.
    """
    try:
        data = json.loads(Path(file).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read as a policy file: {error}") from None
    return policy_from_dict(data, str(file))


def policy_from_dict(data: Any, where: str = "policy") -> EffortPolicy:
    """Policy of JSON values.

    Raises:
        ConfigError: it is not a policy; says what and where.
    """
    named = dict(zip(policy_names(), POLICIES, strict=True))
    name = data.get("policy") if isinstance(data, dict) else None
    if name not in named:
        raise ConfigError(f"{where}: policy = {name!r}.{closest(str(name), named)} Legal values: {', '.join(named)}.")
    try:
        return from_dict(named[name], data, where)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
