"""Deprecated public names keep working for one release, with a warning."""

from __future__ import annotations

from typing import Any

import pytest

import sharding
from jaxllm import models


@pytest.mark.parametrize(
    ("package", "old", "new"),
    [
        (models, "Cached", "KVSpec"),
        (models, "LatentConfig", "MLAConfig"),
        (models, "Packed", "PackedWeight"),
        (models, "PackedExperts", "PackedWeight"),
        (models, "Scoring", "AttentionParams"),
        (models, "layers_apart", "unstack_layers"),
        (sharding, "Product", "MatmulFn"),
        (sharding, "products", "project_many"),
        (sharding, "scatter_sum", "reduce_partial_sums"),
    ],
)
def test_a_deprecated_name_is_the_new_one(package: Any, old: str, new: str) -> None:
    with pytest.warns(FutureWarning, match=f"{package.__name__}.{old} is now {package.__name__}.{new}"):
        found = getattr(package, old)
    assert found is getattr(package, new)


@pytest.mark.parametrize("package", [models, sharding])
def test_an_unknown_name_is_an_attribute_error(package: Any) -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        getattr(package, "nothing")  # noqa: B009 - the name is data
