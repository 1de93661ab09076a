"""Simulation of a GPU's warpgroups, copies and barriers: races as failures, kernels compiled once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax import core
from jax._src.pallas.mosaic.interpret import thread_map
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

RACE = "a race of warpgroups, or with a copy"


@contextlib.contextmanager
def no_races() -> Iterator[None]:
    """Fails if a kernel that ran inside raced; what is asynchronous must be waited for inside too.

    jax 0.10 compiles an interpreted kernel anew for each thread of each place in the grid; in here it is compiled once.

    Raises:
        AssertionError: two accesses of one place in memory, one of them a write, that nothing orders.
    """
    programs: dict[Any, Any] = {}
    states: list[Any] = []
    lock = threading.Lock()

    def run(jaxpr: Any, consts: Any, *args: Any) -> None:
        with lock:
            if jaxpr not in programs:

                def evaluate(consts: Any, *args: Any) -> Any:
                    return core.eval_jaxpr(jaxpr, consts, *args)

                programs[jaxpr] = jax.jit(evaluate).lower(consts, *args).compile()
        programs[jaxpr](consts, *args)

    name = next(name for name in ("RaceDetectionState", "GPURaceDetectionState") if hasattr(gpu_callbacks, name))
    original = getattr(gpu_callbacks, name)

    def remembered(*args: Any, **kw: Any) -> Any:
        states.append(original(*args, **kw))
        return states[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_callbacks, name, remembered)
        patch.setattr(thread_map, "_run_jaxpr", run)
        try:
            yield
        except BaseException as error:
            gpu_callbacks.reset_gpu_interpret_mode_state()
            if "RACE DETECTED" in str(error):  # newer versions of jax end the call
                raise AssertionError(RACE) from error
            raise
    assert states, "no kernel was interpreted with races detected"
    assert not any(state.races_found for state in states), RACE
