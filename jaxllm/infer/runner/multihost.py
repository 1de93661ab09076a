"""Multi-host serving: one engine over several processes. Process 0 schedules; the others repeat its runner's calls.

    engine = Engine.of(model, params, config, mesh=mesh)     # in every process, on a mesh of all devices
    if group().is_leader:
        ...                                                  # requests
        engine.close()
    else:
        engine.follow()                                      # returns when process 0 closes its engine

Process 0 broadcasts every call of its runner before it makes the call itself, so that all processes run the same
programs in the same order; the inputs of a step are a few thousand elements. A step's outputs are replicated on every
device, so process 0 reads them from its own.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxllm.infer.runner.adapter_pool import AdapterPool, Page
from jaxllm.infer.runner.model_runner import ModelRunner
from jaxllm.infer.runner.program_cache import ProgramCache
from jaxllm.infer.runner.runner_protocol import RunnerSpec
from jaxllm.infer.runner.step.step_shape import StepShape
from jaxllm.models import Functional
from jaxllm.parallel.distributed import group
from pallas_kernels.paged_attention import Slots

TOPIC = "engine"
"""Broadcast topic of the runner's calls."""
PATIENCE = 365 * 24 * 3600.0
"""Seconds that followers wait for the next call; a lost process is detected by its heartbeat instead."""


class MultihostRunner:
    """Runner of a mesh that spans processes: broadcasts its calls in process 0, repeats them in the others.

    Args:
        runner: runner of this process's devices.
    """

    def __init__(self, runner: ModelRunner):
        self._runner, self._group, self._turn = runner, group(), 0

    @property
    def follows(self) -> bool:
        """Whether this process only repeats the steps of process 0."""
        return not self._group.is_leader

    @property
    def spec(self) -> RunnerSpec:
        """Sizes of batch and KV cache."""
        return self._runner.spec

    @property
    def model(self) -> Functional:
        """Model that is served."""
        return self._runner.model

    @property
    def params(self) -> Any:
        """Weights in use."""
        return self._runner.params

    @property
    def pools(self) -> Any:
        """Page pools of the KV cache."""
        return self._runner.pools

    @property
    def mesh(self) -> Mesh | None:
        """Mesh of all processes' devices."""
        return self._runner.mesh

    @property
    def adapter_pool(self) -> AdapterPool | None:
        """Layout of the pool of adapters."""
        return self._runner.adapter_pool

    @property
    def token_bytes(self) -> int:
        """Bytes of KV cache per token, in all layers and on all shards."""
        return self._runner.token_bytes

    @property
    def programs(self) -> Mapping[str, Any]:
        """Compiled programs of this process, by name."""
        return self._runner.programs

    @property
    def program_cache(self) -> ProgramCache:
        """Cache of this process's compiled programs."""
        return self._runner.program_cache

    def choose(self, requests: int, tokens: int, *, decode: bool, full: bool) -> StepShape:
        """Shape of the smallest compiled program that a step fits into."""
        return self._runner.choose(requests, tokens, decode=decode, full=full)

    def run(self, shape: StepShape, packed: np.ndarray, masks: np.ndarray | None = None) -> Any:
        """Starts a step in every process."""
        self._tell("run", [shape.tokens, shape.decode, shape.full], packed, *(() if masks is None else (masks,)))
        return _PendingResult(self, self._turn, self._runner.run(shape, packed, masks))

    def seat(self, replica: int, packed: np.ndarray) -> None:
        """Writes a request's logits-processor state into its slot, in every process."""
        self._tell("seat", [replica], packed)
        self._runner.seat(replica, packed)

    def read(self, replica: int, group: int, pages: list[int]) -> Slots:
        """Copies pages of a replica's pool to this host; every process takes part."""
        self._tell("read", [replica, group, pages])
        return self._runner.read(replica, group, pages)

    def write(self, replica: int, group: int, pages: list[int], content: Slots) -> None:
        """Copies pages into a replica's pool, in every process."""
        self._tell("write", [replica, group, pages], *jax.tree.leaves(content))
        self._runner.write(replica, group, pages, content)

    def write_adapter(self, page: int, content: Page) -> None:
        """Writes a page of an adapter into the pool of adapters, in every process."""
        self._tell("adapter", [page], *content)
        self._runner.write_adapter(page, content)

    def swap(self, params: Any) -> None:
        """Replaces the weights in every process; the others bring their own shards, see ``follow``."""
        self._runner.check(params)
        self._tell("swap", [])
        self._runner.swap(params)

    def close(self) -> None:
        """Ends ``follow`` in the other processes."""
        self._tell("close", [])

    def delivered(self, turn: int) -> None:
        """Deletes the broadcasts before ``turn``: a step's result shows that every process has received them."""
        if not self.follows:
            self._group.delete_broadcasts(TOPIC, turn)

    def _tell(self, name: str, values: list[Any], *arrays: np.ndarray) -> None:
        """Broadcasts a call to the followers."""
        if self.follows:
            return
        held = [[str(a.dtype), a.shape, base64.b64encode(a.tobytes()).decode()] for a in arrays]
        self._group.broadcast(TOPIC, json.dumps([name, values, held]))
        self._turn += 1

    def follow(self, weights: Callable[[], Any] | None = None) -> None:
        """Repeats the calls of process 0's runner until it closes.

        Args:
            weights: returns this process's shards of the weights that process 0 swaps in; None: they never change.

        Raises:
            RuntimeError: process 0 swaps weights, and ``weights`` is None.
        """
        runner = self._runner
        while True:
            name, values, held = json.loads(self._group.broadcast(TOPIC, timeout=PATIENCE))
            arrays = [np.frombuffer(base64.b64decode(text), dtype).reshape(shape) for dtype, shape, text in held]
            if name == "close":
                return
            if name == "swap":
                if weights is None:
                    raise RuntimeError(
                        "process 0 swaps weights, and follow() was not told where this process has them: pass weights=."
                    )
                runner.swap(weights())
            elif name == "run":
                runner.run(runner.shape(*values), *arrays)
            elif name == "seat":
                runner.seat(*values, *arrays)
            elif name == "adapter":
                (page,) = values
                runner.write_adapter(page, tuple(arrays))
            elif name == "read":
                runner.read(*values)
            else:
                replica, index, pages = values
                pool = jax.tree.structure(runner.pools[index])
                runner.write(replica, index, pages, jax.tree.unflatten(pool, arrays))


class _PendingResult:
    """Result of a step that may still run; reading it also deletes the broadcasts that led to it."""

    def __init__(self, runner: MultihostRunner, turn: int, result: Any):
        self._runner, self._turn, self._result = runner, turn, result

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        array = np.asarray(self._result)
        self._runner.delivered(self._turn)
        return array
