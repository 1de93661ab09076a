"""Ranking of twelve layouts of one model, by formula and as compiled programs: the same order.

    python -m tests.proofs.plan.ranking [NAME ...]    compiles those that are not stored, or the named ones again

Compiled seconds are the walker's: the TPU compiler's own estimates of each kernel, collectives where the schedule has
them, at the links' bandwidth (``jaxllm.compiler.timeline``).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxllm.compiler import program_walker, timeline
from jaxllm.compiler.replica_groups import Placement
from jaxllm.config import from_dict, to_dict
from jaxllm.files import write_json
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MlpConfig
from jaxllm.plan.formulas import step_time
from jaxllm.plan.formulas.calibration import DEFAULT
from jaxllm.plan.hardware import Cluster
from jaxllm.plan.timeline_rates import rates_of
from jaxllm.train import RunConfig
from jaxllm.train.compile_step import compiler_options, step_on
from recipes.llama3 import llama3_8b
from sharding import MeshSpec
from sharding.isolate import run_isolated
from sharding.topology import Topology
from tests.proofs.harness import proof

ON = "v6e:2x4"
STORED = Path(__file__).with_suffix(".json")


def _layout(mesh: str, remat: str = "full", accumulate: int = 1, zero: int = 3) -> RunConfig:
    """A model of 1.0B parameters, 16 rows of 4,096."""
    run = llama3_8b()
    block = BlockConfig(AttentionConfig(heads=16, kv_heads=8, head_dim=128), MlpConfig(hidden=8192))
    model = DecoderConfig(
        vocab_size=32_768,
        embed_dim=2048,
        layers=16,
        pattern=(block,),
        tied=False,
        dtype="bfloat16",
        remat=remat,  # type: ignore[arg-type]
    )
    data = dataclasses.replace(run.data, seq_len=4096, batch_size=16)
    plan = dataclasses.replace(run.parallel, sequence="tensor" in mesh, zero=zero)  # type: ignore[arg-type]
    return dataclasses.replace(
        run, name="ranked", model=model, data=data, mesh=mesh, accumulate=accumulate, parallel=plan
    )


LAYOUTS = {
    "fsdp=8": _layout("fsdp=8"),
    "fsdp=8 elementwise": _layout("fsdp=8", "elementwise"),
    "fsdp=8, 2 micro-batches": _layout("fsdp=8", accumulate=2),
    "fsdp=8, 2 micro-batches, ZeRO-2": _layout("fsdp=8", accumulate=2, zero=2),
    "data=8": _layout("data=8"),
    "data=2,fsdp=4": _layout("data=2,fsdp=4"),
    "fsdp=4,tensor=2": _layout("fsdp=4,tensor=2"),
    "fsdp=4,tensor=2 elementwise": _layout("fsdp=4,tensor=2", "elementwise"),
    "fsdp=2,tensor=4": _layout("fsdp=2,tensor=4"),
    "tensor=8": _layout("tensor=8"),
    "tensor=8 elementwise": _layout("tensor=8", "elementwise"),
    "data=4,tensor=2": _layout("data=4,tensor=2"),
}


def compiled_here(topology: Topology, config: dict[str, Any]) -> dict[str, float]:
    """Seconds of the compiled step; in a process set up for the topology's compiler."""
    import jax

    run = from_dict(RunConfig, config)
    step, arguments, mesh = step_on(topology, run)
    with jax.set_mesh(mesh):
        text = step.lower(*arguments).compile(compiler_options=compiler_options(topology, run)).as_text()
    program = program_walker.read(text, Placement.of(mesh))
    spec = MeshSpec(tuple((name, size) for name, size in mesh.shape.items()))
    plain = rates_of(Cluster.parse(topology.name), spec)
    rates = dataclasses.replace(plain, send=lambda exchange: plain.send(exchange) / DEFAULT.link)
    made = timeline.timeline(program, rates)
    return {"seconds": made.seconds, "compute": made.compute, "exposed": sum(made.exposed.values())}


def compile_layout(name: str) -> dict[str, float]:
    """The compiler's word on a layout, now."""
    target = "tests.proofs.plan.ranking:compiled_here"
    return run_isolated(target, ON, {"config": to_dict(LAYOUTS[name])})


def stored() -> dict[str, dict[str, float]]:
    """Stored seconds of the compiled layouts."""
    return json.loads(STORED.read_text()) if STORED.is_file() else {}


def predicted(name: str) -> float:
    """Seconds of a layout by formula."""
    run = LAYOUTS[name]
    return step_time.predict(run, Cluster.parse(ON), MeshSpec.parse(run.mesh)).seconds


def kendall(pairs: Sequence[tuple[float, float]]) -> float:
    """Kendall's tau: (pairs in the same order - pairs in the other) / all pairs."""
    signs = [(a[0] - b[0]) * (a[1] - b[1]) for a, b in itertools.combinations(pairs, 2)]
    return sum((s > 0) - (s < 0) for s in signs) / len(signs)


def order() -> dict[str, float]:
    """Formulas against the stored seconds of compiled programs: what their order lacks, what their first costs."""
    found = stored()
    formula = {name: predicted(name) for name in LAYOUTS}
    seconds = {name: found[name]["seconds"] for name in LAYOUTS}
    return {
        "one less tau": 1 - kendall([(seconds[name], formula[name]) for name in LAYOUTS]),
        "first over best": seconds[min(formula, key=lambda name: formula[name])] / min(seconds.values()) - 1,
        "half of the spread": 2 * min(seconds.values()) / max(seconds.values()),
    }


@proof(
    "plan", cases=("all",), sample=1, bound={"one less tau": 0.2, "first over best": 0.05, "half of the spread": 1.0}
)
def ranking(_: str) -> dict[str, float]:
    """Kendall's tau is 0.8 or more, over layouts whose times differ twofold, and the formulas' first is within 5%."""
    return order()


@proof("plan", cases=("fsdp=8", "tensor=8", "fsdp=8 elementwise"), sample=1, bound={"stored": 0.02})
def ranking_recompiled(name: str) -> dict[str, float]:
    """A layout compiled again has the seconds that the order of formulas is checked against."""
    return {"stored": abs(compile_layout(name)["seconds"] / stored()[name]["seconds"] - 1)}


def main(names: list[str]) -> None:
    """Compiles layouts and stores each as it comes."""
    for name in names or [name for name in LAYOUTS if name not in stored()]:
        found = compile_layout(name)
        write_json(STORED, dict(sorted({**stored(), name: found}.items())))
        print(name, found, "predicted", predicted(name), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
