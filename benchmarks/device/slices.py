"""Slices of the device kit: each measures one thing in a process of its own, or compiles it for an absent device.

A slice names two functions of this module. ``measure`` runs on the device at hand, ``compile`` in a process that is set
up for a topology's compiler; both get the slice's arguments and return JSON-able figures.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from benchmarks import engine_bytes, train
from benchmarks.kernels import flash
from benchmarks.kernels.measure import measure
from benchmarks.peers.as_run import as_run
from benchmarks.peers.setting import Setting
from benchmarks.train_plan import SHAPES, fitted
from jaxllm.config import to_dict
from jaxllm.convert.load import LoadedModel
from jaxllm.infer.decode_benchmark import DecodeBenchmark, memory_bandwidth
from jaxllm.models import functional
from jaxllm.plan.formulas import memory_estimate, offload_time, step_time
from jaxllm.plan.formulas.device_work import DeviceWork
from jaxllm.plan.hardware import Cluster
from jaxllm.train.compile_step import compile_here
from jaxllm.tune import kernel_tuning
from pallas_kernels import _dispatch, _self_check
from recipes.llama3 import llama3_1b
from sharding import MeshSpec, isolate
from sharding.topology import Topology

PARTS = ("verdicts", "tuning", "kernels", "training", "decoding", "offload")
"""Parts of the kit, in the order in which they are measured."""
KERNELS = {"flash_attention": "flash", "paged_attention": "paged"}
"""Operations that are compared with others' kernels -> modules of ``benchmarks.kernels``."""
TRIALS = 14
"""Block sizes that a tuning slice measures at most, in each of a kernel's passes."""
TUNED = {n: flash.Shape(batch, 8192, heads, 8, n) for n, batch, heads in ((64, 2, 32), (128, 2, 32), (256, 1, 16))}
"""Shapes of flash attention that are tuned (``kernel_tuning.flash_cases``), by head dim."""


@dataclass(frozen=True)
class Slice:
    """One thing to measure.

    Attributes:
        part: one of ``PARTS``.
        name: unique name.
        function: name F of the pair ``measure_F`` and ``compile_F``.
        arguments: arguments of both.
        minutes: that it takes at most, first compilation included; it is not started with less left.
        timed: whether it times anything; those that do not may run at once.
        platform: the only one that it is for, such as "gpu"; empty: any.
    """

    part: str
    name: str
    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    minutes: float = 1.0
    timed: bool = True
    platform: str = ""

    def is_for(self, platform: str) -> bool:
        """Whether the slice runs on a platform."""
        return self.platform in ("", platform)


def slices(tiny: bool = False) -> list[Slice]:
    """All slices in order; tiny ones to try the kit."""
    found = list[Slice]()
    for operation, kernel, platform in kernels():
        arguments = {"operation": operation, "implementation": kernel}
        name = f"verdict {operation} {kernel}"
        found.append(Slice("verdicts", name, "verdict", arguments, timed=False, platform=platform))
    for dim in () if tiny else (128, 64, 256):
        found.append(Slice("tuning", f"tuning flash_attention {dim}", "tuning", {"head_dim": dim}, 4.0))
    for operation, module in KERNELS.items():
        shapes = importlib.import_module(f"benchmarks.kernels.{module}")
        for shape in shapes.TINY if tiny else shapes.SHAPES:
            arguments = {"operation": operation, "shape": shape, "tiny": tiny}
            found.append(Slice("kernels", f"{operation} {shape}", "kernel", arguments, 1.5))
    for shape in ("tiny",) if tiny else ("124m", "1b", "8b"):
        for precision in ("bf16", "fp8_current"):
            arguments = {"shape": shape, "precision": precision}
            found.append(Slice("training", f"training {shape} {precision}", "training", arguments, 2.5))
    for batch in (1,) if tiny else (1, 16, 64):
        found.append(Slice("decoding", f"decoding 1b, batch {batch}", "decoding", {"batch": batch, "tiny": tiny}, 2.0))
    for remat in ("full", "elementwise", "offload"):
        arguments = {"shape": "tiny" if tiny else "8b", "precision": "bf16", "remat": remat, "layers": 4}
        found.append(Slice("offload", f"offload, remat {remat}", "training", arguments, 2.0))
    return found


def kernels() -> list[tuple[str, str, str]]:
    """Operation, implementation and platform of every kernel that has samples, those that no default chooses too."""
    return [
        (operation, name, _dispatch.PLATFORMS[name])
        for operation in _self_check.SAMPLES
        for name in importlib.import_module(_dispatch.OPERATIONS[operation]).IMPLEMENTATIONS
        if name in _dispatch.PLATFORMS
    ]


# --- on the device ----------------------------------------------------------------------------------------------------


def measure_verdict(operation: str, implementation: str) -> dict[str, Any]:
    """Verdict of the self-check on a kernel here, made anew."""
    return dataclasses.asdict(_self_check.check(operation, implementation, jax.devices()[0]))


def measure_tuning(head_dim: int) -> dict[str, Any]:
    """Fastest blocks of flash attention for a head dim, where they are not the default ones."""
    kind, platform = jax.devices()[0].device_kind, jax.devices()[0].platform
    platform = "gpu" if platform in ("cuda", "rocm") else platform
    for case in kernel_tuning.flash_cases(platform, kind):
        if str(head_dim) in case.case.replace(",", "").split():
            found = kernel_tuning.tune_case(case, kernel_tuning.device_cost(), TRIALS)
            costs = {"before": found.before, "after": found.after, "trials": found.trials}
            return {"kind": kind, "operation": found.operation, "case": found.case, "blocks": found.fields, **costs}
    return {"kind": kind, "why": f"no blocks to tune for head dim {head_dim} on a {platform}"}


def measure_kernel(operation: str, shape: str, tiny: bool = False) -> dict[str, Any]:
    """Seconds, roofline and errors of an operation's implementations, and of others' kernels."""
    module = importlib.import_module(f"benchmarks.kernels.{KERNELS[operation]}")
    torch = {"torch_python": sys.executable} if operation == "flash_attention" and _has_torch() else {}
    work = module.work((module.TINY if tiny else module.SHAPES)[shape], **torch)
    return {"rows": measure(shape, work, 2 if tiny else 10)}


def measure_training(
    shape: str, precision: str, remat: str = "elementwise", layers: int | None = None
) -> dict[str, Any]:
    """A training step beside its prediction: seconds, MFU, peak memory."""
    on = train.local_topology()
    SHAPES.setdefault("tiny", _tiny())
    command = ["--on", on, "--shape", shape, "--precision", precision, "--torch", "", "--remat", remat, "--no-compile"]
    command += ["--rounds", "1", "--steps", "10"] + ([] if layers is None else ["--layers", str(layers)])
    with tempfile.TemporaryDirectory() as folder:
        train.main([*command, "--out", folder])
        result = json.loads((Path(folder) / "train.json").read_text())["results"][0]
    setting, row = result["setting"], result["rows"][0]
    return {"setting": setting, "row": row, "predicted": _predicted(setting | {"precision": precision}, on)}


def measure_decoding(batch: int, tiny: bool = False) -> dict[str, Any]:
    """Decoding of the 1B model with random weights in bfloat16: tokens/s and the share of the roofline."""
    model, mesh = functional(_serving_model(tiny)), MeshSpec.parse("data=1").build(jax.devices()[:1])
    with jax.set_mesh(mesh):
        params = jax.jit(model.init)(jax.random.key(0))
    no_tokenizer: Any = None
    loaded = LoadedModel(model, params, no_tokenizer, None, mesh, 0, {}, None)
    sizes = (8, 8) if tiny else (128, 128)
    bench = DecodeBenchmark(loaded, batch, *sizes, memory_bandwidth())
    bench.run()
    found = bench.run()
    return {**dataclasses.asdict(found), "tokens_per_second": found.tokens_per_second, "roofline": found.roofline}


# --- for an absent device ---------------------------------------------------------------------------------------------


def compile_verdict(topology: Topology, operation: str, implementation: str) -> dict[str, Any]:
    """Compiles the samples of a self-check that a kernel takes, forward and backward; says why, if it takes none."""
    samples = importlib.import_module(_self_check.SAMPLES[operation]).samples
    found, refused = list[int](), ""
    for dtype in _self_check.DTYPES:
        for sample in samples(dtype):
            run = functools.partial(sample.run, implementation)
            try:
                found.append(_compiled(topology, run, sample.arrays, sample.differentiated))
            except NotImplementedError as refusal:  # as in the check itself
                refused = refused or str(refusal)
    return {"temporaries": max(found), "samples": len(found)} if found else {"refused": refused}


def compile_tuning(topology: Topology, head_dim: int) -> dict[str, Any]:
    """Compiles the default blocks, from which the search begins."""
    name = f"pallas_{topology.platform}"
    return {"temporaries": _kernel_on(topology, "flash", TUNED[head_dim], only=name)[name]}


def compile_kernel(topology: Topology, operation: str, shape: str, tiny: bool = False) -> dict[str, Any]:
    """Compiles an operation's implementations, and others' kernels as far as they compile without the device."""
    module = importlib.import_module(f"benchmarks.kernels.{KERNELS[operation]}")
    only = f"pallas_{topology.platform}" if tiny else ""
    return _kernel_on(topology, KERNELS[operation], (module.TINY if tiny else module.SHAPES)[shape], only)


def compile_training(
    topology: Topology, shape: str, precision: str, remat: str = "elementwise", layers: int | None = None
) -> dict[str, Any]:
    """Compiles a training step with as many layers as the formula says fit."""
    setting = _tiny() if shape == "tiny" else SHAPES[shape]
    setting = dataclasses.replace(setting, device=topology.platform, remat=remat, precision=precision)
    layers = layers or fitted(setting, [precision], topology.name, compiling=False)[0]
    run = as_run(dataclasses.replace(setting, layers=layers))
    report = compile_here(topology, to_dict(run))
    return {"layers": layers, "temporaries": report["temp_bytes"], "arguments": report["argument_bytes"]}


def compile_decoding(topology: Topology, batch: int, tiny: bool = False) -> dict[str, Any]:
    """Compiles the engine's decode program of the 8B recipe for a batch."""
    return engine_bytes.compiled(topology, batch, 256, "stacked", tiny=tiny)


def compiled_here(topology: Topology, tiny: bool, names: list[str]) -> dict[str, dict[str, Any]]:
    """Compiles the slices of those names; one that does not compile says why."""
    found: dict[str, dict[str, Any]] = {}
    for one in slices(tiny):
        if one.name not in names or not one.is_for(topology.platform):
            continue
        began = time.monotonic()
        isolate.stage(one.name)
        try:
            found[one.name] = globals()[f"compile_{one.function}"](topology, **one.arguments)
        except Exception as error:  # whatever a compiler raises: the table says it
            found[one.name] = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
        found[one.name]["seconds"] = round(time.monotonic() - began, 1)
    return found


def _kernel_on(topology: Topology, module: str, shape: Any, only: str = "") -> dict[str, Any]:
    """Bytes of temporaries of each contender, or why it does not compile."""
    operation = importlib.import_module(f"benchmarks.kernels.{module}")
    made: list[Any] = []

    def inputs() -> Any:
        made.append(operation.work(shape))
        return made[0].inputs

    with jax.set_mesh(_mesh(topology)):
        arrays = jax.eval_shape(inputs)
    found: dict[str, Any] = {}
    for name, function in made[0].contenders.items():
        if only and name != only:
            continue
        try:
            found[name] = _compiled(topology, function, arrays, made[0].differentiated)
        except Exception as error:  # others' kernels fail in many ways: the table says which
            if name in (f"pallas_{topology.platform}", "xla"):
                raise
            found[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
    return found


def _compiled(topology: Topology, function: Callable[..., Any], arrays: Any, differentiated: int) -> int:
    """Compiles a function and its gradients for one device of a topology; returns the bytes of its temporaries."""

    def both(*arrays: Any) -> Any:
        if not differentiated:
            return function(*arrays)
        rest = arrays[differentiated:]
        out, pull = jax.vjp(lambda *own: function(*own, *rest), *arrays[:differentiated])
        return out, pull(out)

    mesh = _mesh(topology)
    place = NamedSharding(mesh, PartitionSpec())
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), arrays)
    with jax.set_mesh(mesh):
        memory: Any = jax.jit(both).lower(*given).compile().memory_analysis()
    return memory.temp_size_in_bytes


def _mesh(topology: Topology) -> Mesh:
    return Mesh(np.array(topology.devices()[:1]), ("data",), axis_types=(AxisType.Auto,))


def _tiny() -> Setting:
    """A training setting to try the kit."""
    return Setting(layers=2, hidden=64, mlp=128, heads=2, kv_heads=1, vocab=256, batch=2, seq_len=64)


def _serving_model(tiny: bool) -> Any:
    config = dataclasses.replace(llama3_1b().model, param_dtype="bfloat16", dtype="bfloat16")
    return dataclasses.replace(config, layers=2, vocab_size=512) if tiny else config


def _predicted(setting: Mapping[str, Any], on: str) -> dict[str, float] | None:
    """Predicted seconds and bytes of a step, and seconds of its copies to the host; None for a CPU."""
    if on.startswith("cpu"):
        return None
    run, cluster = as_run(Setting(**setting)), Cluster.parse(on)
    work = DeviceWork.of(run, MeshSpec.parse(run.mesh))
    return {
        "seconds": step_time.predict_work(work, cluster).seconds,
        "bytes": memory_estimate.predict_work(work, cluster.topology).total,
        "copies": offload_time.copy_seconds(work, cluster.hardware),
    }


def _has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def main(name: str, tiny: bool, out: str) -> None:
    """Measures one slice and writes its figures."""
    one = next(one for one in slices(tiny) if one.name == name)
    Path(out).write_text(json.dumps(globals()[f"measure_{one.function}"](**one.arguments)))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "tiny", sys.argv[3])
