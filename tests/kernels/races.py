"""Races that TPU interpret mode finds: it prints them and does not fail."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu


@contextlib.contextmanager
def none_found() -> Iterator[None]:
    """Fails if a kernel that ran inside raced; what is asynchronous must be waited for inside too.

    Raises:
        AssertionError: two accesses of one place in memory, one of them a write, that nothing orders.
    """
    original, states = interpret_pallas_call.RaceDetectionState, []

    def remembered(*args: Any, **kw: Any) -> Any:
        states.append(original(*args, **kw))
        return states[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpret_pallas_call, "RaceDetectionState", remembered)
        try:
            yield
        except BaseException:
            pltpu.reset_tpu_interpret_mode_state()
            raise
    assert states, "no kernel was interpreted with races detected"
    assert not any(state.races_found for state in states), "a race between devices, or between a copy and a kernel"
