"""Ahead-of-time compilation of what a policy's run does beside its training step, for devices that are not there.

    compile_rollouts_for(config, "v6e:8x8")    # {"prompt-1024-full": report, "decode-64-full": ..., "swap": ...}

"swap" is the program that makes the engine's weights of the run's: adapters merged, matrices in compute dtype. How they
move from the run's mesh to the engine's is no program.
"""

from __future__ import annotations

import math
from typing import Any

import jax

from jaxllm.compiler import aot
from jaxllm.config import ConfigError, from_dict, to_dict
from jaxllm.infer.abstract_runner import AbstractRunner
from jaxllm.models import functional
from jaxllm.models.value_head import without_value_head
from jaxllm.posttrain.policy_config import PolicyRunConfig
from jaxllm.posttrain.policy_training import weights_to_serve
from jaxllm.posttrain.rollouts import rollout_engine_config, rollout_mesh
from jaxllm.train.compile_step import compiler_options
from jaxllm.train.run import run_mesh
from jaxllm.train.run_model import base_model, run_model
from jaxllm.train.step.step_builder import build_optimizer, run_state
from sharding import MeshSpec
from sharding.isolate import Progress, run_isolated
from sharding.topology import Topology


def compile_rollouts_for(
    config: PolicyRunConfig, on: str, *, progress: Progress | None = None
) -> dict[str, aot.CompileReport]:
    """Compiles the largest steps of the run's engine, and its swap, for a topology in a separate process.

    Args:
        config: the run; its mesh is laid over the topology's devices.
        on: the topology's name, such as "v6e:8x8"; all of its devices sample.
        progress: called about once a second.

    Raises:
        ConfigError: rollouts are sampled on some of the devices alone.
        ShardingError, OutOfDeviceMemory, CompilerMissing: as for ``jaxllm.train.compile_step.compile_for``.
    """
    devices = Topology.parse(on).num_devices
    samples = (
        math.prod(size for _, size in MeshSpec.parse(config.rollout.mesh).axes) if config.rollout.mesh else devices
    )
    if samples != devices:
        raise ConfigError(
            f'rollout.mesh = "{config.rollout.mesh}" samples on {samples} of {devices} devices; give it all of them to '
            "compile the engine's programs."
        )
    found = run_isolated(
        "jaxllm.posttrain.compile_rollouts:compile_here", on, {"config": to_dict(config)}, progress=progress
    )
    return {name: aot.CompileReport.from_json(report) for name, report in found.items()}


def compile_here(topology: Topology, config: dict[str, Any]) -> dict[str, Any]:
    """``compile_rollouts_for`` in this process, which must be set up for the topology's compiler."""
    run = from_dict(PolicyRunConfig, config)
    model, trained = base_model(run), run_model(run)
    mesh = run_mesh(run, trained, topology.devices())
    own = rollout_mesh(run.rollout.mesh, mesh) or mesh
    shapes = jax.eval_shape(model.in_compute_dtype, model.abstract())
    engine = run.engine_beside
    sizes = rollout_engine_config(engine.sequences, engine.tokens, batched_tokens=run.rollout.max_batched_tokens)
    runner = AbstractRunner(functional(model.config, model.rules), shapes, sizes, own)
    options = compiler_options(topology, run)

    def compiled(name: str, function: Any, where: Any, *arguments: Any) -> dict[str, Any]:
        report = aot.compile(
            function, *arguments, topology=topology, mesh=where, name=name, options=options, progress=aot.to_stderr
        )
        return report.to_json()

    found = {
        name: compiled(name, one.jit(), own, *one.arguments.values()) for name, one in runner.largest_programs().items()
    }
    state = run_state(run, trained, build_optimizer(run, trained), mesh)
    params = without_value_head(state.params)
    return found | {"swap": compiled("swap", jax.jit(weights_to_serve(run, trained)), mesh, params)}
