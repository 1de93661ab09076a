"""Programs of steps with files, compiled for TPUs: the device's bytes by formula, whole and program by program."""

from __future__ import annotations

from jaxllm.data import DataConfig
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MlpConfig
from jaxllm.optim import OptimConfig
from jaxllm.plan.capacity_table import run_kinds, summed
from jaxllm.plan.hardware import Cluster
from jaxllm.train import RunConfig
from jaxllm.train.compile_step import step_memory_for
from jaxllm.train.disk.config import DiskConfig
from sharding import MeshSpec
from tests.proofs.harness import proof

MESH, DEVICES = "fsdp=4", 4
LAYERS, WIDTH, VOCABULARY, ROWS, LENGTH, WINDOW = 4, 2048, 4096, 4, 1024, 2
LAYER = 4 * 16 * WIDTH * WIDTH / DEVICES
"""Bytes of a device's part of a layer's float32 parameters, but for its norms; its moments are twice as many."""
ENDS = 4 * 2 * VOCABULARY * WIDTH / DEVICES
HIDDEN = 2 * ROWS * LENGTH * WIDTH / DEVICES
CODE = 12 * 2**20
"""Most bytes of a program's code."""


def run(parameters: bool) -> RunConfig:
    """A run whose layers are much larger than the code of their programs."""
    block = BlockConfig(AttentionConfig(WIDTH // 128, WIDTH // 128, 128), MlpConfig(4 * WIDTH))
    model = DecoderConfig(VOCABULARY, WIDTH, LAYERS, pattern=(block,), dtype="bfloat16", remat="full", tied=False)
    return RunConfig(
        model=model,
        data=DataConfig(batch_size=ROWS, seq_len=LENGTH),
        mesh=MESH,
        steps=10,
        optim=OptimConfig(clip_norm=None),
        disk=DiskConfig("DIR", window=WINDOW, parameters=parameters),
    )


def arguments_and_results(parameters: bool) -> dict[str, float]:
    """Bytes of arrays that programs have on a device, by hand: arguments and results, donated ones once."""
    if parameters:
        return {
            "forward 0": LAYER + 2 * HIDDEN,
            "backward 0": 2 * LAYER + 3 * HIDDEN,  # parameters and gradients; input, gradients of output and input
            "update 0": 2 * LAYER + 2 * 2 * LAYER,  # the gradients become new parameters
            "ends": 2 * ENDS + 2 * 2 * ENDS,
        }
    return {
        "updates 0": 2 * LAYERS * LAYER + LAYER + 2 * 2 * LAYER,  # of a row: new parameters, moments before and after
        "updates": ENDS + ENDS + 2 * 2 * ENDS,
        "puts 0": LAYERS * LAYER + LAYER,
    }


@proof(
    "offload",
    cases=[(on, parameters) for on in ("v5e:2x2", "v6e:2x2") for parameters in (True, False)],
    sample=1,
    bound={"arrays": 0.002, "programs": 0.1, "over the plan": 0.005, "below the plan": 0.1},
)
def programs_of_files_for_tpus(case: tuple[str, bool]) -> dict[str, float]:
    """Optimizer state on disk, with parameters and without: bytes of a device. Of streamed layers the arrays by the
    planner, less those by hand, and less those of the compiled step; of every program arguments and results by hand,
    less what it takes as compiled, and the other way round beyond 12 MiB of code and, of forward and backward, which
    gather weights, the temporaries that the step counts; the compiled step over what the plan says, and of the state
    alone below it (the plan's working memory of streamed layers is that of a whole step)."""
    on, parameters = case
    config, cluster = run(parameters), Cluster.parse(on)
    kinds = run_kinds(config, MeshSpec.parse(MESH), cluster)
    planned, memory = summed(kinds).device, step_memory_for(config, on)
    errors = {"arrays": 0.0, "programs": 0.0, "over the plan": max(0.0, memory.device / planned - 1)}
    errors["below the plan"] = 0.0 if parameters else 1 - memory.device / planned
    if parameters:
        running = min(3, LAYERS)
        by_hand = 2 * ENDS + 2 * 2 * ENDS + (4 * running + 3 * WINDOW) * LAYER + 4 * 3 * HIDDEN
        arrays = planned - kinds["all else"].device
        compiled = memory.device - memory.temporaries
        errors["arrays"] = max(abs(arrays / by_hand - 1), abs(compiled / by_hand - 1))
        assert memory.host == LAYERS * HIDDEN
    for name, size in arguments_and_results(parameters).items():
        found = memory.programs[name]
        print(f"{on} {name}: {found / 2**20:.2f} MiB, {size / 2**20:.2f} by hand")
        more = CODE + memory.temporaries * name.startswith(("forward", "backward"))
        errors["programs"] = max(errors["programs"], 1 - found / size, (found - more) / size - 1)
    return errors
