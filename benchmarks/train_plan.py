"""Shapes that ``benchmarks.train`` trains, and how many layers of each fit into a device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.peers.as_run import as_run
from benchmarks.peers.setting import Setting
from jaxllm.plan.formulas.memory_estimate import predict
from jaxllm.train.compile_step import compile_for
from sharding import MeshSpec
from sharding.isolate import OutOfDeviceMemory
from sharding.topology import GENERATIONS, Topology

SHAPES = {
    "124m": Setting("gpt2", 12, 768, 3072, 12, 12, 50_257, batch=32, seq_len=1024),
    "1b": Setting("llama", 16, 2048, 8192, 32, 8, 128_256, batch=1, seq_len=8192),
    "8b": Setting("llama", 32, 4096, 14_336, 32, 8, 128_256, tied=False, batch=1, seq_len=8192),
}
"""Those of the recipes gpt2_124m, llama3_1b and llama3_8b, with all layers, and a batch for one accelerator."""
SHARE = 0.92
"""Of a GPU's memory, what a process may take; the rest is the driver's and the libraries'."""


@dataclass(frozen=True)
class Planned:
    """A setting's step on a device, by formula and as its compiler planned it.

    Attributes:
        formula_bytes: by ``jaxllm.plan.formulas.memory_estimate``; None of a CPU.
        compiled_bytes: of the program; None where nothing was compiled, or the compiler refused it.
        budget: bytes there are; None where that is not known.
        compiled: whether the compiler was asked.
    """

    formula_bytes: int | None
    compiled_bytes: int | None
    budget: int | None
    compiled: bool

    @property
    def fits(self) -> bool:
        """By the compiler where it was asked, else by formula."""
        known = self.compiled_bytes if self.compiled else self.formula_bytes
        return self.budget is None or (known is not None and known <= self.budget)


def planned(setting: Setting, on: str, compiling: bool) -> Planned:
    """Asks the formula and, if ``compiling``, the compiler of the topology; a CPU's programs are not planned."""
    topology = Topology.parse(on)
    if topology.hbm_bytes is None:
        return Planned(None, None, None, compiled=False)
    run = as_run(setting)
    budget = int(topology.hbm_bytes * (SHARE if topology.platform == "gpu" else 1))
    formula = predict(run, MeshSpec.parse(run.mesh), topology).total
    if not compiling:
        return Planned(formula, None, budget, compiled=False)
    try:
        size = compile_for(run, on).total_bytes
    except OutOfDeviceMemory:  # of the TPU compiler; the GPU compiler takes any size
        size = None
    return Planned(formula, size, budget, compiled=True)


def most(fits: Callable[[int], bool], guess: int, limit: int) -> int:
    """The largest of 1 to ``limit`` that fits, sought from ``guess`` up and down; 0 if none does.

    Args:
        fits: true up to some number and false above it.
    """
    number = max(1, min(guess, limit))
    if fits(number):
        while number < limit and fits(number + 1):
            number += 1
        return number
    while number > 0:
        number -= 1
        if number == 0 or fits(number):
            break
    return number


def fitted(
    setting: Setting, precisions: Sequence[str], on: str, compiling: bool
) -> tuple[int, dict[tuple[str, int], Planned]]:
    """(as many of the setting's layers as fit in every precision, what was asked of them on the way).

    The formula's answer is where the search with the compiler begins, so that few programs are compiled.
    """

    def search(guess: int, compiling: bool) -> tuple[int, dict[tuple[str, int], Planned]]:
        asked: dict[tuple[str, int], Planned] = {}

        def fits(layers: int) -> bool:
            for precision in precisions:
                of = dataclasses.replace(setting, layers=layers, precision=precision)
                asked[precision, layers] = planned(of, on, compiling)
                if not asked[precision, layers].fits:
                    return False
            return True

        return most(fits, guess, setting.layers), asked

    layers, asked = search(setting.layers, compiling=False)
    if compiling and Topology.parse(on).hbm_bytes is not None:
        layers, asked = search(layers, compiling=True)
    return layers, asked


def topology_of(platform: str, device_kind: str) -> str:
    """The name of one such device, for the compiler.

    Raises:
        ValueError: no generation of accelerators is of that kind.
    """
    if platform == "cpu":
        return "cpu:1"
    short = lambda kind: kind.split()[:2] if platform == "gpu" else kind  # noqa: E731 (NVIDIA H100 PCIe and the like)
    for name, generation in GENERATIONS.items():
        if generation.platform == platform and short(generation.device_kind) == short(device_kind):
            one = "x".join("1" * (generation.example.count("x") + 1))
            return f"{name}:{one}"
    known = ", ".join(kind.device_kind for kind in GENERATIONS.values())
    raise ValueError(f"a {device_kind} is none of {known}: say which of them it is like, such as --on h100:1x1.")
