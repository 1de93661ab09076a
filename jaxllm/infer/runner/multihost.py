"""One engine over several processes: process 0 schedules, and all do what it sends to its devices.

    engine = Engine.of(model, params, config, mesh=mesh)     # in every process, on a mesh of all devices
    if group().leads:
        ...                                                  # requests
        engine.close()
    else:
        engine.follow()                                      # returns when process 0 closes its engine

Every call of the device is told to the others before it is made here, in the same order; arrays of a step are a few
thousand numbers. What a step makes is whole on every device, so process 0 reads it from its own.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxllm.infer.runner.engine_step import Shape
from jaxllm.infer.runner.model_runner import Device, Spec
from jaxllm.parallel.distributed import group
from pallas_kernels.paged_attention import Slots

TOPIC = "engine"


PATIENCE = 365 * 24 * 3600.0
"""Seconds without a request; a process that vanishes is noticed otherwise."""


class Leading:
    """A ``Runner`` whose calls the other processes repeat."""

    def __init__(self, device: Device):
        self.device, self._group, self._turn = device, group(), 0

    @property
    def spec(self) -> Spec:
        """Sizes."""
        return self.device.spec

    @property
    def manifest(self) -> Any:
        """Of the programs of this process."""
        return self.device.manifest

    def choose(self, requests: int, tokens: int, *, decode: bool, full: bool) -> Shape:
        """The smallest program that a step fits."""
        return self.device.choose(requests, tokens, decode=decode, full=full)

    def run(self, shape: Shape, packed: np.ndarray, masks: np.ndarray | None = None) -> Any:
        """Sends a step, everywhere."""
        self._tell("run", [shape.tokens, shape.decode, shape.full], packed, *(() if masks is None else (masks,)))
        return _Later(self, self._turn, self.device.run(shape, packed, masks))

    def seat(self, replica: int, packed: np.ndarray) -> None:
        """Puts what a request asks for into its slot, everywhere."""
        self._tell("seat", [replica], packed)
        self.device.seat(replica, packed)

    def read(self, replica: int, group: int, pages: list[int]) -> Slots:
        """Pages of a replica's pool, on this host."""
        self._tell("read", [replica, group, pages])
        return self.device.read(replica, group, pages)

    def write(self, replica: int, group: int, pages: list[int], content: Slots) -> None:
        """Puts pages into a replica's pool, everywhere."""
        self._tell("write", [replica, group, pages], *(x for x in content if x is not None))
        self.device.write(replica, group, pages, content)

    def swap(self, params: Any) -> None:
        """Puts other weights in the place of those there are, everywhere: the others bring theirs."""
        self.device.check(params)
        self._tell("swap", [])
        self.device.swap(params)

    def close(self) -> None:
        """The others stop following."""
        self._tell("close", [])

    def heard(self, turn: int) -> None:
        """A step has run, so all have heard what was told before it."""
        self._group.forget(TOPIC, turn)

    def _tell(self, name: str, numbers: list[Any], *arrays: np.ndarray) -> None:
        held = [[str(a.dtype), a.shape, base64.b64encode(a.tobytes()).decode()] for a in arrays]
        self._group.tell(TOPIC, json.dumps([name, numbers, held]))
        self._turn += 1


class _Later:
    """What a step makes."""

    def __init__(self, leading: Leading, turn: int, result: Any):
        self._leading, self._turn, self._result = leading, turn, result

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        made = np.asarray(self._result)
        self._leading.heard(self._turn)
        return made


def follow(device: Device, weights: Callable[[], Any] | None = None) -> None:
    """Repeats what process 0 does with its device, until it closes.

    Args:
        device: of this process.
        weights: gives this process's hold of the weights that process 0 swaps in; None: they never change.

    Raises:
        RuntimeError: process 0 swaps, and there is no ``weights``.
    """
    among = group()
    while True:
        name, numbers, held = json.loads(among.tell(TOPIC, timeout=PATIENCE))
        arrays = [np.frombuffer(base64.b64decode(text), dtype).reshape(shape) for dtype, shape, text in held]
        if name == "close":
            return
        if name == "swap":
            if weights is None:
                raise RuntimeError("process 0 swaps weights, and follow() was not told where this process has them.")
            device.swap(weights())
        elif name == "run":
            device.run(device.shape(*numbers), *arrays)
        elif name == "write":
            replica, index, pages = numbers
            device.write(replica, index, pages, Slots(*arrays))
        else:
            getattr(device, name)(*numbers, *arrays)
