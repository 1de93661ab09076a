"""Joint training step of several adapters: bytes that it moves and memory that it takes, over steps of one run.

    python -m benchmarks.memory.together [--on h100:1x1,v6e:1x1] [--counts 1,4] [--rows 4] [--layers 2]

SmolLM2 with LoRA in the recipe sft_smollm2, its layers cut to a few, compiled for devices that need not be there; bytes
are read from the programs' texts (``jaxllm.compiler.hbm_traffic``). A step of many rows moves mostly activations, one
of few rows mostly the base, which a joint step reads once.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import Any

from sharding.isolate import run_isolated


def compiled(topology: Any, counts: list[int], rows: int, layers: int) -> list[dict[str, int]]:
    """In a child that is set up for the topology's compiler: figures of joint steps of so many runs."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding

    from jaxllm.compiler import hbm_traffic
    from jaxllm.data import Batch
    from jaxllm.models.param_subset import select
    from jaxllm.peft import AdapterConfig
    from jaxllm.train.run import build_value_and_grad, fitting_mesh
    from jaxllm.train.run_model import run_model, saved_params
    from jaxllm.train.step.step_builder import build_optimizer, build_split_step, run_state
    from jaxllm.train.together.together_step import jit_joint_step, joint_step
    from recipes.sft import sft_smollm2

    run = sft_smollm2()
    run = replace(
        run,
        model=replace(run.model, layers=layers),
        adapter=AdapterConfig("lora"),
        accumulate=1,
        mesh="data=1",
        data=replace(run.data, batch_size=rows),
    )
    model = run_model(run)
    mesh = fitting_mesh(run, model, topology.num_devices, topology.platform).build(topology.devices())
    optimizer, grads, saved = (
        build_optimizer(run, model),
        build_value_and_grad(run, model, mesh),
        saved_params(run, model),
    )
    state = run_state(run, model, optimizer, mesh)
    own = replace(state, params=select(saved, state.params))
    base = jax.tree.map(lambda mine, leaf: None if mine else leaf, saved, state.params)
    shape = (rows, run.data.seq_len)
    there = NamedSharding(mesh, model.rules.spec(("batch", "seq"), mesh, shape, what="batch"))
    batch = Batch(*[jax.ShapeDtypeStruct(shape, jnp.int32, sharding=there)] * 4)  # type: ignore[arg-type]
    update = build_split_step(run, model, grads, optimizer).update
    found = []
    for count in counts:
        step: Any = jit_joint_step(joint_step(grads, [update] * count, saved), (own,) * count)
        with jax.set_mesh(mesh):
            program = step.lower(base, (own,) * count, (batch,) * count).compile()
        memory: Any = program.memory_analysis()
        found.append(
            {
                "moved": hbm_traffic.read(program.as_text() or "").bytes,
                "memory": memory.argument_size_in_bytes + memory.temp_size_in_bytes,
            }
        )
    return found


def main(arguments: list[str] | None = None) -> int:
    """Entry point of ``python -m benchmarks.memory.together``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", default="h100:1x1,v6e:1x1")
    parser.add_argument(
        "--counts", default="1,4", help="runs of a step; the first is what the others are compared with"
    )
    parser.add_argument("--rows", type=int, default=4, help="rows of 512 tokens of each run")
    parser.add_argument("--layers", type=int, default=2)
    given = parser.parse_args(arguments)
    counts = [int(count) for count in given.counts.split(",")]
    for on in given.on.split(","):
        sizes = {"counts": counts, "rows": given.rows, "layers": given.layers}
        figures = run_isolated("benchmarks.memory.together:compiled", on, sizes)
        alone = {name: value / counts[0] for name, value in figures[0].items()}
        for count, one in zip(counts, figures, strict=True):
            print(
                f"{on}, {count} runs of {given.rows} rows: "
                + ", ".join(
                    f"{name} {one[name] / 1e9:.2f} GB ({one[name] / alone[name] / count:.2f} of alone)" for name in one
                ),
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
