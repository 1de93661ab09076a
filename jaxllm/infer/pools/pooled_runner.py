"""Pooled runner: the runners of all engines of a prefill pool and a decode pool.

Both pools are in one process, or each decode engine is in a process of its own (``decode_process``). An engine has a
number: those of the prefill pool come first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxllm.config import ConfigError
from jaxllm.infer.engine_config import EngineConfig
from jaxllm.infer.pools.decode_engine import DecodeEngine
from jaxllm.infer.pools.decode_listener import DecodeListener
from jaxllm.infer.pools.phase_runner import Phase, PhaseRunner
from jaxllm.infer.pools.pool_argument import AttentionPoolSizes, PoolSize, PoolSizes, parse_pools
from jaxllm.infer.pools.pool_facts import pool_facts
from jaxllm.infer.pools.remote_engine import RemoteDecodeEngine
from jaxllm.infer.runner.adapter_pool import Page
from jaxllm.infer.runner.program_cache import ProgramCache
from jaxllm.infer.runner.runner_protocol import RunnerSpec
from jaxllm.infer.runner.step.step_shape import StepShape
from jaxllm.models import Functional


class PooledRunner:
    """Runner of disaggregated pools, see ``Runner``.

    What is asked of one engine is asked of the first decode engine of this process; of the first prefill engine, where
    decode engines have processes of their own.

    Args:
        model, params: model and all of its weights, on any devices; every engine gets a copy.
        config: sizes of each engine, with ``pools``.
        mesh: None: pools have meshes of their own.
        progress: see ``Engine.of``: of the programs of all engines of this process.
        decode_listener: accepts the processes of the decode pool; None: it is in this process. The runner waits until
            all of them have come.
        options: of ``ModelRunner``.

    Raises:
        ValueError: there is a mesh, there are fewer devices, several processes of a mesh, or sizes that do not go
            together.
        ShardingError: a dimension of the model does not divide over an engine's devices.

    Attributes:
        engines: runner of each engine of this process, those of the prefill pool first.
        prefill, decode: engines of each pool.
        main: the engine that is asked what is asked of one.
        decode_listener: as given.
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
        decode_listener: DecodeListener | None = None,
        **options: Any,
    ):
        sizes = check_pools(config, mesh, None if decode_listener is None else "prefill")
        assert isinstance(sizes, PoolSizes)
        devices, own = iter(jax.devices()), dataclasses.replace(config, pools=None)
        parts: list[tuple[Phase, PoolSize]] = [("prefill", sizes.prefill), ("decode", sizes.decode)]
        if decode_listener is not None:
            parts.pop()
        told = [(0, 1)] * sum(size.engines for _, size in parts)

        def listener(number: int) -> Callable[[str, int, int], None]:
            def tell(stage: str, done: int, total: int) -> None:
                told[number] = done, total
                if progress is not None:
                    progress(stage, *map(sum, zip(*told, strict=True)))

            return tell

        self.engines: list[PhaseRunner] = []
        for phase, size in parts:
            for _ in range(size.engines):
                own_devices = [next(devices) for _ in range(size.tensor)]
                one = PhaseRunner(
                    model, params, own, phase, own_devices, sizes.decode.tensor, sum(x.devices for _, x in parts),
                    progress=listener(len(self.engines)), **options,
                )  # fmt: skip
                self.engines.append(one)
        self.prefill: list[PhaseRunner] = self.engines[: sizes.prefill.engines]
        self.decode: Sequence[DecodeEngine] = self.engines[sizes.prefill.engines :]
        self.decode_listener = decode_listener
        if decode_listener is not None:
            first = self.prefill[0]
            decode_listener.expect(pool_facts(model, params, config, first))
            self.decode = [RemoteDecodeEngine(first, own) for _ in range(sizes.decode.engines)]
            for one in self.decode:
                one.use(decode_listener.wait())
        self.main = self.prefill[0] if decode_listener is not None else self.engines[sizes.prefill.engines]

    # Of one engine, where engines differ

    @property
    def spec(self) -> RunnerSpec:
        """Sizes of a decode engine's batch and KV cache."""
        return self.decode[0].spec

    @property
    def model(self) -> Functional:
        """Model that is served."""
        return self.main.model

    @property
    def params(self) -> Any:
        """Weights of an engine."""
        return self.main.params

    @property
    def pools(self) -> Any:
        """Page pools of an engine."""
        return self.main.pools

    @property
    def mesh(self) -> Mesh | None:
        """Mesh of an engine; None for one device."""
        return self.main.mesh

    @property
    def token_bytes(self) -> int:
        """Bytes of KV cache per token in an engine."""
        return self.main.token_bytes

    @property
    def program_cache(self) -> ProgramCache:
        """Cache of an engine's programs."""
        return self.main.program_cache

    @property
    def programs(self) -> dict[str, Any]:
        """Compiled programs of this process by name; those of engines of one pool are alike."""
        return {**self.prefill[0].programs, **self.main.programs}

    @property
    def devices(self) -> list[Any]:
        """Devices of all engines of this process, in the order of the engines."""
        return [device for one in self.engines for device in one.devices]

    def runner_of(self, program: str) -> PhaseRunner | None:
        """Runner of an engine of the pool that a step's program is of; those of one pool are alike.

        None: the program is of a pool in other processes.
        """
        return next((one for one in (self.main, self.prefill[0]) if program in one.programs), None)

    def engine(self, number: int) -> PhaseRunner | DecodeEngine:
        """Engine of a number; -1 for the last."""
        return [*self.prefill, *self.decode][number]

    # Of the engine that is named

    def choose(self, requests: int, tokens: int, *, decode: bool, full: bool, engine: int = -1) -> StepShape:
        """Shape of a step of an engine, see ``Runner``."""
        return self.engine(engine).choose(requests, tokens, decode=decode, full=full)

    def run(self, shape: StepShape, packed: np.ndarray, masks: np.ndarray | None = None, *, engine: int = -1) -> Any:
        """Starts a step of an engine, see ``Runner``."""
        return self.engine(engine).run(shape, packed, masks)

    def seat(self, replica: int, packed: np.ndarray) -> None:
        """Writes a request's logits-processor state into its slot of engine ``replica``."""
        self.engine(replica).seat(0, packed)

    def read(self, replica: int, group: int, pages: list[int]) -> Any:
        """Copies pages of engine ``replica``, which is of this process, to the host."""
        return self.engines[replica].read(0, group, pages)

    def write(self, replica: int, group: int, pages: list[int], content: Any) -> None:
        """Copies pages from the host to engine ``replica``, which is of this process."""
        self.engines[replica].write(0, group, pages, content)

    # Of all engines

    def write_adapter(self, page: int, content: Page) -> None:
        """Pools serve no adapters.

        Raises:
            ValueError: always.
        """
        raise ConfigError("engine: pools serve no adapters; leave pools out.")

    def swap(self, params: Any) -> None:
        """Replaces the weights of all engines; see ``ModelRunner``.

        Raises:
            ValueError: they are other weights, or decode engines are in other processes; nothing is changed then.
        """
        self.engines[0].check(params)
        for one in reversed([*self.prefill, *self.decode]):  # a decode engine in another process refuses first
            one.swap(params)

    def follow(self, weights: Callable[[], Any] | None = None) -> None:
        """Not supported: decode processes are told what to do by ``decode_process``.

        Raises:
            RuntimeError: always.
        """
        self.engines[0].follow(weights)

    def close(self) -> None:
        """Ends the connections to the decode pool's processes, where it has some; they wait for the next."""
        if self.decode_listener is not None:
            self.decode_listener.close()
            for one in self.decode:
                if isinstance(one, RemoteDecodeEngine) and one.session is not None:
                    one.session.close()


def check_pools(
    config: EngineConfig, mesh: Mesh | None = None, phase: Phase | None = None
) -> PoolSizes | AttentionPoolSizes:
    """Sizes of the pools of a configuration.

    Args:
        config: with ``pools``.
        mesh: None: pools have meshes of their own.
        phase: the one whose engines this process has, where each decode engine is in a process of its own; None: both.

    Raises:
        ValueError: there is a mesh, there are fewer devices than the pools have here, several processes of a mesh, or
            settings that do not go with pools in several processes.
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
            f"engine: pools = {config.pools!r} are not of processes of one mesh, of which there are "
            f"{jax.process_count()}. Serve from one (JAXLLM_PROCESSES=1), with a process for each decode engine "
            "(--disaggregation-mode), or split heads over a mesh."
        )
    needed, whose = sizes.devices, ""
    if phase is not None:
        if not isinstance(sizes, PoolSizes):
            raise ConfigError(
                f"engine: pools = {config.pools!r} are of one process, and only prefill and decode pools may have "
                "several: leave --disaggregation-mode out."
            )
        if config.preemption == "swap":
            raise ConfigError(
                "engine: preemption = 'swap' does not go with a decode pool in other processes, whose pages this one "
                "does not keep on its host: use 'recompute'."
            )
        needed = sizes.prefill.devices if phase == "prefill" else sizes.decode.tensor
        whose = " for the prefill pool" if phase == "prefill" else " for an engine of the decode pool"
    if (there := len(jax.devices())) < needed:
        raise ConfigError(
            f"engine: pools = {config.pools!r} need {needed} devices{whose}, and there are {there}: give fewer "
            "engines, or fewer devices to each pool."
        )
    return sizes
