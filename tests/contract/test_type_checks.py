"""Functions of the packages are checked while tests run: types of all, and shapes of those that take arrays."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from jaxllm.infer.sampling_params import SamplingParams
from jaxllm.plan.hardware import Cluster
from pallas_kernels.flash_attention import flash_attention


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: Cluster.parse(8), "violates type hint"),  # type: ignore[arg-type]
        (lambda: SamplingParams(temperature="warm"), "violates type hint"),  # type: ignore[arg-type]
        (lambda: flash_attention(*(jnp.zeros((1, 4, heads, 8)) for heads in (2, 2, 1))), "Type-check error"),
    ],
    ids=["a function", "a dataclass", "dimensions that differ"],
)
def test_what_does_not_fit_its_annotation_is_refused(call, said) -> None:
    with pytest.raises(TypeError, match=said):
        call()
