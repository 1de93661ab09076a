"""Compiled deployment: the largest prefill and decode programs of an engine, compiled for devices that are not here.

    compile_deployment(deployment).programs    # {"prompt-2048-plain": report, "decode-256-plain": report}

What a search plans by formula, bytes of weights, KV cache and temporaries, stands beside what the compiler makes of the
same engine: its mesh, formats, pages and sizes are those of ``Deployment.spec``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxllm.compiler import aot
from jaxllm.config import from_dict, to_dict
from jaxllm.infer.abstract_runner import AbstractRunner
from jaxllm.infer.engine_config import EngineConfig
from jaxllm.infer.runner.paged_cache import with_whole_tiles
from jaxllm.infer.runner.serving_mesh import with_layouts
from jaxllm.models import DecoderConfig, functional
from jaxllm.plan.formulas.serving_step import PLAIN
from jaxllm.quant.formats.format_table import WEIGHT_FORMATS
from jaxllm.quant.packing import packed_shapes
from jaxllm.simulate.deployment import Deployment, DeploymentError
from sharding import MeshSpec
from sharding.isolate import Progress, run_isolated
from sharding.topology import Topology


@dataclass(frozen=True)
class PlannedBytes:
    """Bytes of one device by formula.

    Attributes:
        weights: matrices, embedding and norms.
        cache: page pools of the KV cache.
        temporaries: residual stream, inner activations and logits of the largest step.
    """

    weights: float
    cache: float
    temporaries: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.weights + self.cache + self.temporaries

    @classmethod
    def of(cls, deployment: Deployment) -> PlannedBytes:
        """Bytes of a device of a deployment."""
        model, spec, config = deployment.step_model, deployment.spec, deployment.engine
        pages = sum(
            count // model.span * model.group_token_bytes(group) * spec.page_size
            for group, count in enumerate(spec.pages)
        )
        return cls(
            model.device_weight_bytes, pages, model.temporary_bytes(config.max_batched_tokens, config.max_sequences)
        )


@dataclass(frozen=True)
class CompiledDeployment:
    """Largest programs of a deployment's engine, compiled.

    Attributes:
        planned: bytes of a device by formula.
        programs: report of each program by name: of the largest step with prefill, and of the largest decode step.
    """

    planned: PlannedBytes
    programs: Mapping[str, aot.CompileReport]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "planned": dataclasses.asdict(self.planned),
            "programs": {name: report.to_json() for name, report in self.programs.items()},
        }


def why_not_compiled(deployment: Deployment) -> str:
    """Reason why the programs of a deployment cannot be compiled without its devices; empty if they can."""
    hardware, config = deployment.cluster.hardware, deployment.engine
    if hardware.like != hardware.name:
        return f"no compiler for {hardware.name} is available"
    if config.stages > 1:
        return "programs of pipeline stages are compiled on devices alone"
    if config.mla != "exact" or config.kv_span:
        return f"programs with {'kv_span' if config.kv_span else 'mla = ' + config.mla} are compiled on devices alone"
    if deployment.weights != PLAIN and deployment.weights not in WEIGHT_FORMATS:
        return f"this engine does not pack weights as {deployment.weights}"
    if type(deployment) is not Deployment:
        return "engines with an attention pool are compiled on devices alone"
    return ""


def engine_sizes(deployment: Deployment) -> EngineConfig:
    """Configuration of a deployment's engine with all sizes settled."""
    spec, config = deployment.spec, with_whole_tiles(deployment.engine, deployment.step_model.platform)
    pages = max(
        count // group.parts for count, group in zip(spec.pages, spec.groups, strict=True) if group.window is None
    ) if any(group.window is None for group in spec.groups) else max(spec.pages)  # fmt: skip
    return dataclasses.replace(config, pages=pages, page_size=spec.page_size, max_len=spec.max_len)


def compile_deployment(deployment: Deployment, *, progress: Progress | None = None) -> CompiledDeployment:
    """Compiles the largest prefill and decode programs of a deployment's engine in a child process.

    Args:
        deployment: deployment that fits by formula.
        progress: called about once a second.

    Raises:
        DeploymentError: the programs cannot be compiled here, see ``why_not_compiled``.
        OutOfDeviceMemory: the compiler reports that a program does not fit.
        CompilerMissing: no compiler is installed; names the extra to install.
    """
    if reason := why_not_compiled(deployment):
        raise DeploymentError(f"{deployment.name} on {deployment.cluster.name} is not compiled: {reason}.")
    given = {
        "model": to_dict(deployment.model),
        "sizes": to_dict(engine_sizes(deployment)),
        "mesh": ",".join(f"{name}={size}" for name, size in deployment.mesh.axes),
        "weights": deployment.weights,
    }
    found = run_isolated(
        "jaxllm.simulate.search.compiled_deployment:compile_here",
        deployment.engine_cluster.topology,
        given,
        progress=progress,
    )
    programs = {name: aot.CompileReport.from_json(report) for name, report in found.items()}
    return CompiledDeployment(PlannedBytes.of(deployment), programs)


def compile_here(
    topology: Topology, model: dict[str, Any], sizes: dict[str, Any], mesh: str, weights: str
) -> dict[str, Any]:
    """``compile_deployment`` in this process, which must be set up for the topology's compiler."""
    config, engine = from_dict(DecoderConfig, model), from_dict(EngineConfig, sizes)
    served, built = functional(config), MeshSpec.parse(mesh).build(topology.devices())
    shapes = served.abstract() if weights == PLAIN else packed_shapes(served, weights)
    runner = _LaidOutRunner(served, shapes, engine, built)
    return {
        name: aot.compile(
            one.jit(), *one.arguments.values(), topology=topology, mesh=built, name=name, progress=aot.to_stderr
        ).to_json()
        for name, one in runner.largest_programs().items()
    }


class _LaidOutRunner(AbstractRunner):
    """Abstract runner whose weights lie in the memory layout that ``ModelRunner`` gives them on the platform."""

    def __init__(self, model: Any, params: Any, config: EngineConfig, mesh: jax.sharding.Mesh):
        super().__init__(model, params, config, mesh)
        platform = mesh.devices.flat[0].platform
        self._abstract_weights = with_layouts(self.model, self._abstract_weights, platform)
