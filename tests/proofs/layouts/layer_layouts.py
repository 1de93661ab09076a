"""Layouts by layer: a mesh axis that splits heads in some layers and rows in others, against one device."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import numpy as np

from jaxllm.data import DataConfig
from jaxllm.models import MoeConfig, functional
from jaxllm.parallel.collective_traffic import expected_collectives
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.train import RunConfig
from jaxllm.train.compile_step import compile_for
from pallas_kernels.ring_attention.layout import LAYOUTS
from sharding import MeshSpec
from sharding.layer_layouts import rules_of
from tests import environment, tiny
from tests.proofs.first_run.parity import run
from tests.proofs.harness import proof
from tests.proofs.parallelism.traffic import GPUS, OPTIONS, TPUS, difference, run_of

KINDS = ("dense", "grouped queries", "biases and norms", "mixture", "shared expert", "latent attention")
MESHES = ("tensor=8", "fsdp=4,tensor=2", *(f"{axis}=2,tensor=4" for axis in ("data", "fsdp", "context", "expert")))
MORE = ("ulysses=2,tensor=4", "local=2,data=2,tensor=2")
RANGES = ("tensor=2,fsdp=2", "fsdp=2,tensor=2", "tensor=1,fsdp=2,tensor=1", "fsdp=1,tensor=2,fsdp=1", "fsdp")
CELLS = [(mesh, layers, kind) for mesh in (*MESHES, *MORE) for layers in RANGES for kind in KINDS]
DRAWN = [CELLS[i] for i in sorted(np.random.default_rng(35).choice(len(CELLS), 32, replace=False))]
STEPS = 5


def example_of(mesh: str, layers: str, kind: str) -> dict[str, Any]:
    """Rest of a case, from the seed."""
    rng = np.random.default_rng(environment.derive(environment.seed(), mesh, layers, kind))

    def one(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    micro = one(1, 2)
    plain = kind == "biases and norms"
    experts = kind in ("mixture", "shared expert")
    return {
        "preset": mesh,
        "plan": {
            "layers": layers,
            "zero": one(1, 2, 3),
            "sequence": one(False, True),
            "context": one("ring", "all_gather"),
            "layout": one(*LAYOUTS),
        },
        "model": {
            "layers": 4,
            "heads": 8,
            "kv_heads": one(2, 4) if kind == "grouped queries" else 8,
            "head_dim": 4,
            "embed_dim": 16,
            "vocab_size": 16,
            "mlp": 32,
            "moe": (8, one(1, 2), 8, False, 8 if kind == "shared expert" else 0) if experts else None,
            "latent": 8 if kind == "latent attention" else 0,
            "bias": "all" if plain else "none",
            "qk_norm": one("head", "all") if plain else "none",
            "norm": one("layer", "rms_plus_one") if plain else "rms",
            "norms": one("post", "sandwich") if plain else "pre",
            "tied": one(False, True),
            "remat": one("none", "elementwise", "full", "none=3,full=1", "full=2,elementwise=2"),
        },
        "rows": 8 * micro,
        "seq_len": 16,
        "packed": one(False, True),
        "accumulate": micro,
        "z_loss": 1e-2,
        "routing": {"balance_loss": 0.1, "z_loss": 0.01} if experts else {},
        "seed": int(rng.integers(2**16)),
    }


@proof(
    "layouts", cases=DRAWN, sample=1, float64=True, bound={"loss": 1e-10, "gradient": 1e-10, "curve of 5 steps": 1e-10}
)
def layouts_by_layer_float64(cell: tuple[str, str, str]) -> dict[str, float]:
    """Loss, each leaf's gradient, routing losses included, and a 5-step AdamW curve."""
    example = example_of(*cell)
    mesh, rules = MeshSpec.parse(example["preset"]).abstract(), ParallelConfig(**example["plan"]).rules()
    assert rules.layouts
    apart = rules_of(rules, "fsdp")
    assert "tensor" in str(apart.spec(("batch", "seq"), mesh))
    assert "tensor" not in str(apart.spec(("heads", "mlp"), mesh))
    alone = example | {"plan": example["plan"] | {"layers": "tensor"}}
    (grads_1, losses_1, _), (grads_8, losses_8, spec) = (
        run(one, preset, "float64", STEPS) for one, preset in ((alone, None), (example, example["preset"]))
    )
    assert "tensor" in spec, f"weights are stored split over tensor, and attention/q has spec {spec}"
    relative = np.abs(losses_8 - losses_1) / np.abs(losses_1)
    return {
        "loss": relative[0],
        "gradient": tiny.leaf_error(grads_8, grads_1),
        "curve of 5 steps": relative.max(),
    }


PLANS: dict[str, tuple[str, dict[str, Any], int]] = {
    "tensor, then fsdp": ("fsdp=2,tensor=4", {"layers": "tensor=4,fsdp"}, 1),
    "fsdp, then tensor": ("fsdp=2,tensor=4", {"layers": "fsdp=4,tensor"}, 1),
    "fsdp in the middle, sequence": ("fsdp=2,tensor=4", {"layers": "tensor=2,fsdp=4,tensor", "sequence": True}, 1),
    "fsdp alone, sequence, two micro-batches": ("fsdp=2,tensor=4", {"layers": "fsdp", "sequence": True}, 2),
    "over all devices": ("tensor=8", {"layers": "tensor=4,fsdp", "sequence": True}, 1),
    "beside data": ("data=2,tensor=4", {"layers": "tensor=4,fsdp", "sequence": True}, 1),
}
"""Mesh, plan, micro-batches. Ranges are of several layers: a compiler keeps what one layer would recompute."""


def mixed_run(mesh: str, plan: dict[str, Any], accumulate: int, layers: int = 8) -> RunConfig:
    """Run of eight layers on eight devices."""
    run = run_of("tensor")
    return dataclasses.replace(
        run,
        mesh=mesh,
        model=dataclasses.replace(run.model, layers=layers),
        parallel=ParallelConfig(**plan),
        accumulate=accumulate,
        data=dataclasses.replace(run.data, batch_size=8 * accumulate),
    )


@proof("layouts", cases=[(name, on) for on in (GPUS, TPUS) for name in PLANS], sample=1, bound=1e-3)
def layouts_by_layer_traffic(case: tuple[str, str]) -> float:
    """Bytes of each kind over each number of devices in a compiled step, beside the formula's."""
    name, on = case
    run = dataclasses.replace(mixed_run(*PLANS[name]), name=name)
    return difference(run, compile_for(run, on))


UNIFORM, MIXED = ("tensor", "fsdp"), "fsdp=4,tensor"
"""Layouts of all layers, and of four dense layers before four mixtures of experts."""


def heterogeneous_run(layers: str) -> RunConfig:
    """Dense layers whose activations are larger than their weights, then mixtures of which the experts are larger."""
    model = tiny.decoder(
        dtype="float32", embed_dim=1024, heads=8, kv_heads=8, head_dim=128, mlp=2816, vocab_size=8192, layers=8,
        tied=False, remat="full",
    )  # fmt: skip
    dense = model.pattern[0]
    mixture = dataclasses.replace(dense, mlp=MoeConfig(32, 2, 2048))
    return RunConfig(
        name=layers,
        model=dataclasses.replace(model, dtype="bfloat16", prefix=(dense,) * 4, pattern=(mixture,)),
        mesh="expert=2,tensor=4",
        parallel=ParallelConfig(layers=layers, sequence=True),
        data=DataConfig(batch_size=8, seq_len=2048),
        compiler_options=OPTIONS,
    )


@proof("layouts", cases=("v5e:2x4",), sample=1, bound={"bytes": 1.0, "predicted bytes": 1.0})
def mixed_layouts_send_less(on: str) -> dict[str, float]:
    """Collectives' bytes of a layout by layer over the least of the uniform ones: compiled, and by formula."""
    sent, wanted = {}, {}
    for layers in (*UNIFORM, MIXED):
        run = heterogeneous_run(layers)
        report = compile_for(run, on)
        kinds = Counter[str]()
        for one in report.collectives:
            kinds[one.kind] += one.total_bytes
        model = functional(run.model, run.parallel.rules())
        mesh, data = MeshSpec.parse(run.mesh).abstract(), run.data
        found = expected_collectives(
            model, mesh, run.parallel, rows=data.batch_size, seq_len=data.seq_len, proven=False
        )
        sent[layers], wanted[layers] = sum(kinds.values()), sum(one.bytes * one.count for one in found)
        mib = {kind: round(size / 2**20) for kind, size in sorted(kinds.items()) if size > 2**19}
        print(
            f"{layers}: {sent[layers] / 2**20:.0f} MiB sent ({wanted[layers] / 2**20:.0f} by formula), {mib}, "
            f"temporaries {report.temp_bytes / 2**20:.0f} MiB, cycles {report.cycles}"
        )
    return {
        name: found[MIXED] / min(found[layers] for layers in UNIFORM)
        for name, found in (("bytes", sent), ("predicted bytes", wanted))
    }
