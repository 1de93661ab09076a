"""Deployment: a model served by engines on named devices, with the sizes that a real engine would settle there."""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxllm.config import ConfigError
from jaxllm.infer.engine_config import EngineConfig
from jaxllm.infer.length_limits import choose_max_len
from jaxllm.infer.runner.model_runner import ACCELERATOR_MEMORY_SHARE
from jaxllm.infer.runner.paged_cache import pool_sizes, with_whole_tiles
from jaxllm.infer.runner.runner_protocol import RunnerSpec
from jaxllm.models import DecoderConfig
from jaxllm.plan.formulas.calibration import DEFAULT, Calibration
from jaxllm.plan.formulas.serving_step import PLAIN, ServingStepModel, StepCost
from jaxllm.plan.formulas.shared_cache_step import CacheSharing, SharedCacheStepModel
from jaxllm.plan.formulas.staged_step import StagedStepModel
from jaxllm.plan.hardware import Cluster, Hardware
from jaxllm.simulate.power import PowerModel
from sharding import MeshSpec

LARGEST_TOKEN = 2**31 - 1
"""Vocabulary of simulated requests, so that any two prompts can differ in one token."""


class DeploymentError(ConfigError):
    """Deployment that cannot serve: the model does not fit, or the devices do not divide; says what would."""


@dataclass(frozen=True)
class Deployment:
    """Model on a cluster: engines of equal size, each on a serving mesh.

    Attributes:
        model: architecture; its dtype is the compute dtype.
        cluster: devices of all engines together.
        mesh: serving mesh of one engine.
        engine: sizes of an engine; ``kv_dtype`` is the format of the KV cache.
        weights: format of the blocks' matrices, see ``ServingStepModel``.
        longest: sequence length that the model was trained on: the default of ``engine.max_len``.
        calibration: attained shares of the data sheet's rates.
        launch: seconds that an operation takes beside its work; None: the platform's.
        copies: clusters of this kind, all behind one router.
        host_seconds: seconds of a step in which the devices wait for the engine's host; 0 for an engine that runs a
            step ahead, as this one.
    """

    model: DecoderConfig
    cluster: Cluster
    mesh: MeshSpec
    engine: EngineConfig = field(default_factory=EngineConfig)
    weights: str = PLAIN
    longest: int | None = None
    calibration: Calibration = DEFAULT
    launch: float | None = None
    copies: int = 1
    host_seconds: float = 0.0

    def __post_init__(self) -> None:
        if any(size < 1 for _, size in self.mesh.axes):
            object.__setattr__(self, "mesh", self.mesh.resolve(self.cluster.devices))
        stages = dict(self.mesh.axes).get("stage", 1)
        if stages != self.engine.stages:
            object.__setattr__(self, "engine", replace(self.engine, stages=stages))
        if self.cluster.devices % self.engine_devices:
            raise DeploymentError(
                f"the mesh {self.mesh} has {self.engine_devices} devices, which do not divide the "
                f"{self.cluster.devices} of {self.cluster.name}: give a mesh of a divisor."
            )

    @property
    def engine_devices(self) -> int:
        """Devices of one engine."""
        return math.prod(size for _, size in self.mesh.axes)

    @property
    def engines(self) -> int:
        """Number of engines."""
        return self.devices // self.engine_devices

    @property
    def devices(self) -> int:
        """Devices of all engines."""
        return sum(count for _, count in self.kinds)

    @property
    def kinds(self) -> tuple[tuple[Hardware, int], ...]:
        """Kinds of devices, and how many of each."""
        return ((self.cluster.hardware, self.cluster.devices * self.copies),)

    @property
    def name(self) -> str:
        """Short description: engines, mesh and formats."""
        many = f"{self.engines} x " if self.engines > 1 else ""
        formats = [self.weights] if self.engine.kv_dtype == "auto" else [self.weights, f"kv {self.engine.kv_dtype}"]
        formats += [] if self.engine.mla == "exact" else [self.engine.mla]
        formats += ["kv span"] if self.engine.kv_span else []
        return f"{many}{_mesh_name(self.mesh)}, {', '.join(formats)}"

    @property
    def where(self) -> str:
        """All devices."""
        return self.cluster.name if self.copies == 1 else f"{self.copies} x {self.cluster.name}"

    @functools.cached_property
    def engine_cluster(self) -> Cluster:
        """Devices of one engine.

        Raises:
            DeploymentError: there is no such part of the cluster.
        """
        if self.engine_devices == self.cluster.devices:
            return self.cluster
        found = Cluster.sized(self.cluster.hardware, self.engine_devices)
        if found is None:
            raise DeploymentError(
                f"{self.cluster.hardware.name} has no slice of {self.engine_devices} devices for the mesh {self.mesh}."
            )
        return found

    @functools.cached_property
    def step_model(self) -> ServingStepModel:
        """Step-time model of one engine."""
        config = self.engine
        options: dict[str, Any] = {"weights": self.weights, "kv_dtype": config.kv_dtype}
        options |= {"calibration": self.calibration, "launch": self.launch}
        if config.stages > 1:
            return StagedStepModel(self.model, self.engine_cluster, self.mesh, **options)
        if config.mla == "exact" and not config.kv_span:
            return ServingStepModel(self.model, self.engine_cluster, self.mesh, **options)
        longest = choose_max_len(self.model, config.max_len, self.longest)
        sharing = CacheSharing(config.mla, config.kv_span, config.max_sequences, longest)
        return SharedCacheStepModel(self.model, self.engine_cluster, self.mesh, sharing, **options)

    @functools.cached_property
    def cache_bytes(self) -> float:
        """Bytes of a device that are left for the KV cache; negative if not even the weights fit."""
        model, config = self.step_model, self.engine
        temporaries = model.temporary_bytes(config.max_batched_tokens, config.max_sequences)
        most = ACCELERATOR_MEMORY_SHARE * model.hardware.hbm_bytes
        return most - model.device_weight_bytes - temporaries

    @functools.cached_property
    def spec(self) -> RunnerSpec:
        """Sizes of an engine's batch and KV cache, settled as ``ModelRunner`` settles them on a device.

        Raises:
            DeploymentError: the device has no room for the weights, or for the KV cache of one sequence.
            ValueError: sequences longer than the model supports.
        """
        model, config = self.step_model, with_whole_tiles(self.engine, self.step_model.platform)
        max_len = choose_max_len(self.model, config.max_len, self.longest)
        page_size = config.page_size or -(-max_len // 64) * 64
        columns, groups = -(-max_len // page_size), model.groups
        page_bytes = [model.group_token_bytes(group) * page_size for group in range(len(groups))]

        def sizes(pages: int) -> tuple[int, ...]:
            counts = pool_sizes(config, groups, page_size, columns, pages)
            return tuple(-(-count // model.span) * model.span for count in counts)

        def taken(pages: int) -> float:
            return sum(n * one for n, one in zip(sizes(pages), page_bytes, strict=True))

        least, room = columns + 1, self.cache_bytes
        if taken(least) > room:
            need = (model.device_weight_bytes + taken(least)) / 2**30
            raise DeploymentError(
                f"{self.name} on {self.cluster.name}: a device needs {model.device_weight_bytes / 2**30:.1f} GiB for "
                f"weights and {taken(least) / 2**30:.1f} for the KV cache of one sequence of {max_len:,} tokens, "
                f"{need:.1f} in all; {(room + model.device_weight_bytes) / 2**30:.1f} of "
                f"{model.hardware.hbm_bytes / 2**30:.1f} GiB are there. Give more devices, a smaller format of "
                "weights or KV cache, or a smaller max_len."
            )
        pages = None if config.pages is None else config.pages * model.span
        if pages is None:
            most = int(room // min(page_bytes))
            pages = bisect.bisect_right(range(most + 1), room, key=taken, lo=least) - 1
        return RunnerSpec(
            groups, sizes(pages), page_size, columns, max_len, LARGEST_TOKEN, replicas=model.replicas
        )  # fmt: skip

    @property
    def dollars_per_hour(self) -> float | None:
        """Price of all devices; None where the hardware table has none."""
        total = 0.0
        for hardware, count in self.kinds:
            if hardware.dollars_per_hour is None:
                return None
            total += hardware.dollars_per_hour * count
        return total

    def joules(self, steps: Sequence[StepCost], seconds: float, power: PowerModel) -> float | None:
        """Energy of all engines' steps, and of idling; None where the hardware table has no watts.

        Args:
            steps: costs of the steps of all engines.
            seconds: of all engines, added up.
        """
        watts = self.cluster.hardware.watts
        return None if watts is None else power.energy(steps, seconds, watts) * self.engine_devices

    def sized(self, **changes: object) -> Deployment:
        """Deployment with other sizes of the engine."""
        return replace(self, engine=replace(self.engine, **changes))  # type: ignore[arg-type]


def _mesh_name(mesh: MeshSpec) -> str:
    return ",".join(f"{name}={size}" for name, size in mesh.axes if size > 1) or "one device"
