"""Peak memory of a process that serves with streamed weights.

    python -m tests.infer.peak_memory LAYERS TIER WINDOW DIRECTORY

Prints the bytes of a layer, and the most bytes of memory that the process has had while it served (Linux: VmHWM).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxllm.infer import EngineConfig, SamplingParams
from jaxllm.infer.engine.engine import Engine
from jaxllm.infer.streaming.layer_store import Unit, units_of
from jaxllm.infer.streaming.streamed_runner import StreamedRunner
from jaxllm.infer.streaming.streamed_weights import StreamedWeights, WeightPlacement
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MlpConfig, functional

BLOCK = BlockConfig(AttentionConfig(4, 4, 128), MlpConfig(3072))
CONFIG = EngineConfig(
    max_sequences=1, max_batched_tokens=8, max_len=32, pages=3, page_size=16, buckets=(8,), samplers=("plain",),
    prefix_cache=False,
)  # fmt: skip


class MadeLayers:
    """Store that makes each layer when it is read."""

    tier = "made"

    def __init__(self, template: Any):
        self.template = template

    def read(self, unit: Unit, device: jax.Device) -> Any:
        """See ``LayerStore``."""
        rng = np.random.default_rng(unit.repeat)
        make = lambda x: (rng.random(x.shape[1:], np.float32) / 50).astype(x.dtype)  # noqa: E731
        return jax.device_put(jax.tree.map(make, self.template), device)


def peak_bytes() -> int:
    """Most bytes of memory that this process has had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def main(layers: int, tier: str, window: int, directory: Path) -> None:
    """Serves two tokens."""
    model = functional(DecoderConfig(64, 512, layers, pattern=(BLOCK,)))
    abstract = model.abstract()
    ends = {
        name: jax.tree.map(lambda x: jax.numpy.full(x.shape, 0.01, x.dtype), tree)
        for name, tree in abstract.items()
        if name != "segments"
    }
    template = abstract["segments"]["0"]
    disk = directory if tier == "files" else None
    placement = WeightPlacement(window, 0, None if disk is None else 0, disk, loaders=1)
    weights = StreamedWeights.of(model, ends, MadeLayers(template), placement, [layers])
    assert len(units_of(model.config.segments)) == layers
    engine = Engine.of(model, weights, EngineConfig(**{**vars(CONFIG), "layer_window": window}), strict=True)
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    engine.submit(np.arange(5), SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
    while engine.busy:
        engine.step()
    assert isinstance(engine.runner, StreamedRunner)
    assert engine.runner.window.counts.units == layers * engine.metrics.steps > 0
    engine.runner.close()
    size = sum(x.size // layers * x.dtype.itemsize for x in jax.tree.leaves(template))
    print(size, peak_bytes())


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
