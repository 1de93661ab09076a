"""Peak memory of a process that trains with its parameters on disk.

    python -m tests.train.streamed_memory LAYERS WHERE DIRECTORY

WHERE is "files" or "memory". Prints the bytes of a layer's parameters, and the most bytes of memory that the process
has had in two steps, less what it had before them (Linux: VmHWM, VmRSS).
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import jax

from jaxllm.data import Prefetcher
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MlpConfig
from jaxllm.train.disk.config import DiskConfig
from jaxllm.train.recovery.resume import start_state
from jaxllm.train.run import Run
from tests.process_memory import NOW, PEAK, memory, reset_peak
from tests.train.runs import run_config

BLOCK = BlockConfig(AttentionConfig(4, 4, 128), MlpConfig(3072))
WINDOW = 2


def main(layers: int, where: str, directory: Path) -> None:
    """Takes two steps."""
    config = run_config(directory, clip_norm=None)
    config = dataclasses.replace(
        config,
        model=DecoderConfig(280, 512, layers, pattern=(BLOCK,), remat="full"),
        disk=DiskConfig(str(directory / "files"), window=WINDOW, parameters=True) if where == "files" else DiskConfig(),
    )
    run = Run(config, devices=jax.devices()[:1])
    step, _ = run.compile_step()
    before = memory(NOW)
    with run.saver() as saver, jax.set_mesh(run.mesh), Prefetcher(run.batches, 0, run.put_batch) as batches:
        state, _ = start_state(run, saver)
        size = sum(x.size for x in jax.tree.leaves(run.model.abstract()["segments"])) // layers * 4
        reset_peak()
        for number, batch in batches:
            state, metrics = step(state, batch)
            jax.block_until_ready(metrics["loss"])
            if number == 1:
                break
    print(size, memory(PEAK) - before)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
