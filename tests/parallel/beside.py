"""Overlap in a compiled step, in a child process: copies with a matmul between their start and end."""

from __future__ import annotations

from typing import Any

import jax

from jaxllm.compiler import hlo
from jaxllm.config import from_dict
from jaxllm.train import RunConfig
from jaxllm.train.compile_step import compiler_options, step_on
from sharding.topology import Topology


def copies(topology: Topology, config: dict[str, Any]) -> dict[str, int]:
    """Collective permutes in the program's text: all, and those that overlap with a matmul."""
    run = from_dict(RunConfig, config)
    step, arguments, mesh = step_on(topology, run)
    with jax.set_mesh(mesh):
        compiled = step.lower(*arguments).compile(compiler_options=compiler_options(topology, run))
    return count(hlo.parse(compiled.as_text()))


def count(module: hlo.Module) -> dict[str, int]:
    """See ``copies``."""
    found = {"all": 0, "beside": 0}
    for computation in module.computations.values():
        listed = list(computation.instructions.values())
        found["all"] += sum(instruction.opcode == "collective-permute" for instruction in listed)  # nothing beside it
        for i, start in enumerate(listed):
            if start.opcode == "collective-permute-start":
                end = next(j for j, user in enumerate(listed) if start.name in user.operands and j > i)
                found["all"] += 1
                found["beside"] += any(_multiplies(module, between) for between in listed[i + 1 : end])
    return found


def _multiplies(module: hlo.Module, instruction: hlo.Instruction) -> bool:
    if instruction.opcode in ("dot", "convolution"):
        return True
    inside = module.computations.get(instruction.callee("calls") or "")
    return inside is not None and any(_multiplies(module, i) for i in inside.instructions.values())
