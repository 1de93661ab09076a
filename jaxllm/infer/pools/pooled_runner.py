"""Pooled runner: the runners of all engines of a prefill pool and a decode pool, in one process.

An engine has a number: those of the prefill pool come first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxllm.config import ConfigError
from jaxllm.infer.engine_config import EngineConfig
from jaxllm.infer.pools.phase_runner import Phase, PhaseRunner
from jaxllm.infer.pools.pool_argument import AttentionPoolSizes, PoolSize, PoolSizes, parse_pools
from jaxllm.infer.runner.adapter_pool import Page
from jaxllm.infer.runner.program_cache import ProgramCache
from jaxllm.infer.runner.runner_protocol import RunnerSpec
from jaxllm.infer.runner.step.step_shape import StepShape
from jaxllm.models import Functional


class PooledRunner:
    """Runner of disaggregated pools, see ``Runner``: what is asked of one engine is asked of the first decode engine.

    Args:
        model, params: model and all of its weights, on any devices; every engine gets a copy.
        config: sizes of each engine, with ``pools``.
        mesh: None: pools have meshes of their own.
        progress: see ``Engine.of``: of the programs of all engines.
        options: of ``ModelRunner``.

    Raises:
        ValueError: there is a mesh, there are fewer devices, several processes, or sizes that do not go together.
        ShardingError: a dimension of the model does not divide over an engine's devices.

    Attributes:
        engines: runner of each engine, those of the prefill pool first.
        prefill, decode: those of each pool.
    """

    follows = False
    adapter_pool = None

    def __init__(
        self,
        model: Functional,
        params: Any,
        config: EngineConfig,
        *,
        mesh: Mesh | None = None,
        progress: Callable[[str, int, int], None] | None = None,
        **options: Any,
    ):
        sizes = check_pools(config, mesh)
        assert isinstance(sizes, PoolSizes)
        devices, own = iter(jax.devices()), dataclasses.replace(config, pools=None)
        told = [(0, 1)] * (sizes.prefill.engines + sizes.decode.engines)

        def listener(number: int) -> Callable[[str, int, int], None]:
            def tell(stage: str, done: int, total: int) -> None:
                told[number] = done, total
                if progress is not None:
                    progress(stage, *map(sum, zip(*told, strict=True)))

            return tell

        self.engines: list[PhaseRunner] = []
        parts: list[tuple[Phase, PoolSize]] = [("prefill", sizes.prefill), ("decode", sizes.decode)]
        for phase, size in parts:
            for _ in range(size.engines):
                own_devices = [next(devices) for _ in range(size.tensor)]
                one = PhaseRunner(
                    model, params, own, phase, own_devices, sizes.decode.tensor, sizes.devices,
                    progress=listener(len(self.engines)), **options,
                )  # fmt: skip
                self.engines.append(one)
        self.prefill, self.decode = self.engines[: sizes.prefill.engines], self.engines[sizes.prefill.engines :]

    # Of the first decode engine, where engines differ

    @property
    def spec(self) -> RunnerSpec:
        """Sizes of a decode engine's batch and KV cache."""
        return self.decode[0].spec

    @property
    def model(self) -> Functional:
        """Model that is served."""
        return self.decode[0].model

    @property
    def params(self) -> Any:
        """Weights of a decode engine."""
        return self.decode[0].params

    @property
    def pools(self) -> Any:
        """Page pools of a decode engine."""
        return self.decode[0].pools

    @property
    def mesh(self) -> Mesh | None:
        """Mesh of a decode engine; None for one device."""
        return self.decode[0].mesh

    @property
    def token_bytes(self) -> int:
        """Bytes of KV cache per token in a decode engine."""
        return self.decode[0].token_bytes

    @property
    def program_cache(self) -> ProgramCache:
        """Cache of a decode engine's programs."""
        return self.decode[0].program_cache

    @property
    def programs(self) -> dict[str, Any]:
        """Compiled programs by name; those of engines of one pool are alike."""
        return {**self.prefill[0].programs, **self.decode[0].programs}

    @property
    def devices(self) -> list[Any]:
        """Devices of all engines, in the order of the engines."""
        return [device for one in self.engines for device in one.devices]

    def runner_of(self, program: str) -> PhaseRunner:
        """Runner of an engine of the pool that a step's program is of; those of one pool are alike."""
        return (self.decode if program in self.decode[0].programs else self.prefill)[0]

    # Of the engine that is named

    def choose(self, requests: int, tokens: int, *, decode: bool, full: bool, engine: int = -1) -> StepShape:
        """Shape of a step of an engine, see ``Runner``."""
        return self.engines[engine].choose(requests, tokens, decode=decode, full=full)

    def run(self, shape: StepShape, packed: np.ndarray, masks: np.ndarray | None = None, *, engine: int = -1) -> Any:
        """Starts a step of an engine, see ``Runner``."""
        return self.engines[engine].run(shape, packed, masks)

    def seat(self, replica: int, packed: np.ndarray) -> None:
        """Writes a request's logits-processor state into its slot of engine ``replica``."""
        self.engines[replica].seat(0, packed)

    def read(self, replica: int, group: int, pages: list[int]) -> Any:
        """Copies pages of engine ``replica`` to the host."""
        return self.engines[replica].read(0, group, pages)

    def write(self, replica: int, group: int, pages: list[int], content: Any) -> None:
        """Copies pages from the host to engine ``replica``."""
        self.engines[replica].write(0, group, pages, content)

    # Of all engines

    def write_adapter(self, page: int, content: Page) -> None:
        """Pools serve no adapters.

        Raises:
            ValueError: always.
        """
        raise ConfigError("engine: pools serve no adapters; leave pools out.")

    def swap(self, params: Any) -> None:
        """Replaces the weights of all engines; see ``ModelRunner``."""
        self.engines[0].check(params)
        for one in self.engines:
            one.swap(params)

    def follow(self, weights: Callable[[], Any] | None = None) -> None:
        """Not supported: pools are of one process.

        Raises:
            RuntimeError: always.
        """
        self.engines[0].follow(weights)

    def close(self) -> None:
        """Does nothing: no other process follows."""


def check_pools(config: EngineConfig, mesh: Mesh | None = None) -> PoolSizes | AttentionPoolSizes:
    """Sizes of the pools of a configuration.

    Raises:
        ValueError: there is a mesh, there are fewer devices than the pools have, or several processes.
    """
    assert config.pools is not None
    sizes = parse_pools(config.pools)
    if mesh is not None and mesh.size > 1:
        raise ConfigError(
            f"engine: pools = {config.pools!r} have meshes of their own, and mesh = {dict(mesh.shape)} is one more: "
            "leave it out (--mesh)."
        )
    if jax.process_count() > 1:
        raise ConfigError(
            f"engine: pools = {config.pools!r} are of one process, which moves data between its devices; there are "
            f"{jax.process_count()}. Serve from one (JAXLLM_PROCESSES=1), or split heads over a mesh."
        )
    if (there := len(jax.devices())) < sizes.devices:
        raise ConfigError(
            f"engine: pools = {config.pools!r} need {sizes.devices} devices, and there are {there}: give fewer "
            "engines, or fewer devices to each pool."
        )
    return sizes
