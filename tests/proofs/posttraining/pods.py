"""The recipe for a pod: programs of rollouts and the training step, compiled for devices that are not there."""

from __future__ import annotations

from jaxllm.plan.formulas.engine_memory import engine_bytes
from jaxllm.posttrain.compile_rollouts import compile_rollouts_for
from jaxllm.train.compile_step import compile_for
from recipes.grpo import llama3_8b_grpo
from sharding import MeshSpec
from sharding.topology import Topology
from tests.proofs.harness import proof


@proof("posttraining", cases=("v6e:8x8", "h100:8x8"), sample=1, bound={"engine": 0.01, "memory": 0.9}, parallel=False)
def a_pod_holds_training_and_rollouts(on: str) -> dict[str, float]:
    """engine: arguments of the compiled steps of rollouts, less the formula's bytes, over these. memory: the compiled
    training step and the engine's arrays beside it, and no less than the swap, over the device's memory.
    """
    run, topology = llama3_8b_grpo(), Topology.parse(on)
    found = compile_rollouts_for(run, on)
    arguments = {name: report.argument_bytes for name, report in found.items() if name != "swap"}
    mesh = MeshSpec.parse(run.mesh).resolve(topology.num_devices)
    want = engine_bytes(run.model, run.engine_beside, mesh, topology.platform)
    step = compile_for(run, on)
    engine, memory = max(arguments.values()), step.hbm_bytes or topology.hbm_bytes
    assert memory is not None
    # A swap has the old weights, their successors as they are cast, and those in their places; no gradients.
    swapping = step.argument_bytes + found["swap"].output_bytes + want.weights + engine
    print({"on": on, "step": step.total_bytes, "engine": engine, "swapping": swapping, "memory": memory}, flush=True)
    return {
        "engine": max(abs(size / want.total - 1) for size in arguments.values()),
        "memory": max(step.total_bytes + engine, swapping) / memory,
    }
