"""A control: advantages that have nothing to do with what was sampled."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest


def shuffle_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The advantages of a step are those of a random order of its rewards."""
    from jaxllm.posttrain import policy_training

    rng, own = np.random.default_rng(0), policy_training.with_advantages

    def shuffled(groups: Any, algorithm: Any) -> Any:
        found = own(groups, algorithm)
        return [
            [
                dataclasses.replace(one, advantage=group[n].advantage)
                for one, n in zip(group, rng.permutation(len(group)), strict=True)
            ]
            for group in found
        ]

    monkeypatch.setattr(policy_training, "with_advantages", shuffled)
