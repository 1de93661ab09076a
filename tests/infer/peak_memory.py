"""Peak memory of a process that serves with streamed weights, experts in slots, or a KV cache by tier.

    python -m tests.infer.peak_memory SERVED DIRECTORY

SERVED are fields of ``Served`` as JSON. Prints, in bytes: a layer without its experts, an expert, a part of the KV
cache; the most of live arrays on the last device, and what they are by formula; and the most memory that the process
has had while it served (Linux: VmHWM).
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from concurrent.futures import wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

import sharding
from jaxllm.infer import EngineConfig, SamplingParams
from jaxllm.infer.engine.engine import Engine
from jaxllm.infer.streaming.blocks.block_runner import BlockRunner
from jaxllm.infer.streaming.blocks.cache_placement import CachePlacement
from jaxllm.infer.streaming.layer_store import Unit, split_experts, units_of
from jaxllm.infer.streaming.sharded_layers import device_bytes
from jaxllm.infer.streaming.streamed_runner import StreamedRunner
from jaxllm.infer.streaming.streamed_weights import StreamedWeights, WeightPlacement
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MlpConfig, MoeConfig, RouterConfig, functional
from tests.infer.live_bytes import LiveBytes, WatchedPrograms
from tests.process_memory import PEAK, memory, reset_peak

ATTENTION = AttentionConfig(4, 4, 128)
DENSE, SMALL = BlockConfig(ATTENTION, MlpConfig(3072)), BlockConfig(ATTENTION, MlpConfig(256))
MIXTURE = BlockConfig(ATTENTION, MoeConfig(6, 2, 4096, router=RouterConfig()))
TOKENS, PAGE = 4096, 16
"""Tokens of a part of the KV cache, and of a page."""
CONFIG = EngineConfig(
    max_sequences=1, max_batched_tokens=8, max_len=32, pages=3, page_size=PAGE, buckets=(8,), samplers=("plain",),
    prefix_cache=False,
)  # fmt: skip


@dataclass(frozen=True)
class Served:
    """Model and placement of a process.

    Attributes:
        layers: of the model.
        window: streamed layers on the device at a time.
        where: where all layers are, "host" or "files".
        slots: slots for experts of each of its mixtures; 0: dense layers.
        experts: experts' places behind their slots: all in host memory, or as many as that in it (of all layers
            together) and the others in files.
        batches: batches by turns; 0: one without a KV cache by tier.
        cache: where the KV cache of the batches is.
        parts: parts of the KV cache on the device at a time.
        tensor: devices that each layer is divided over.
    """

    layers: int = 4
    window: int = 1
    where: Literal["host", "files"] = "files"
    slots: int = 0
    experts: int | None = None
    batches: int = 0
    cache: Literal["device", "host", "files"] = "device"
    parts: int = 2
    tensor: int = 1

    @property
    def block(self) -> BlockConfig:
        """Each of the layers; small ones where the KV cache is what is measured."""
        return MIXTURE if self.slots else SMALL if self.batches else DENSE

    def placement(self, directory: Path, expert: int) -> WeightPlacement:
        """The placement; ``expert``: bytes of an expert."""
        files = directory if "files" in (self.where, self.cache) or self.experts is not None else None
        cache = None
        if self.batches:
            on_device, on_host = {"device": (None, None), "host": (0, None), "files": (0, 0)}[self.cache]
            cache = CachePlacement(
                self.batches, on_device, on_host, None if on_host is None else files, tokens=TOKENS, window=self.parts
            )
        return WeightPlacement(
            self.window, 0, 0 if self.where == "files" else None, files, loaders=1, expert_slots=self.slots,
            ahead="none", expert_host_bytes=None if self.experts is None else self.experts * expert, cache=cache,
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


def bytes_of(tree: Any) -> int:
    """Bytes of arrays, or of their shapes."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def main(served: Served, directory: Path) -> None:
    """Serves some tokens of each batch."""
    model = functional(DecoderConfig(64, 512, served.layers, pattern=(served.block,)))
    abstract = model.abstract()
    rng = np.random.default_rng(0)  # tokens differ, and so do their experts
    ends = {
        name: jax.tree.map(lambda x: jax.numpy.asarray(rng.normal(size=x.shape), x.dtype), tree)
        for name, tree in abstract.items()
        if name != "segments"
    }
    template = abstract["segments"]["0"]
    whole = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), template)
    rest, experts = split_experts(whole)
    layer, expert = bytes_of(rest), bytes_of(experts) // MIXTURE.mlp.experts if experts else 0
    placement = served.placement(directory, expert)
    weights = StreamedWeights.of(model, ends, MadeLayers(template), placement, [dataclasses.asdict(served)])
    assert len(units_of(model.config.segments)) == served.layers
    live = LiveBytes()  # on a CPU, arrays in host memory are JAX's too: they and the ends were there before
    sizes, fields, of_layer = dataclasses.replace(CONFIG, layer_window=served.window), dict[str, Any](), layer
    if served.batches:
        sizes = dataclasses.replace(sizes, pages=None, max_len=TOKENS)
    if served.tensor > 1:
        fields["mesh"] = sharding.MeshSpec.parse(f"tensor={served.tensor}").build(jax.devices()[: served.tensor])
        of_layer = device_bytes(model, 0, MadeLayers(template).read(weights.units[0], jax.devices()[0]), fields["mesh"])
    engine = Engine.of(model, weights, sizes, strict=True, **fields)
    runner = engine.runner
    assert isinstance(runner, StreamedRunner)
    part, formula = 0, served.window * of_layer + served.layers * served.slots * expert
    if isinstance(runner, BlockRunner):
        part = fill(runner)
        stay = served.layers * served.batches if served.cache == "device" else 0
        formula += (stay or served.parts) * part
    else:
        formula += bytes_of(runner.pools) // served.tensor

    def settle() -> None:
        wait([future for _, future in runner.window._ahead])
        if isinstance(runner, BlockRunner):
            wait([future for _, future in runner.parts._ahead])

    runner.programs = WatchedPrograms(runner.programs, live, settle)  # type: ignore[assignment]
    settle()
    reset_peak()
    for _ in range(max(1, served.batches)):
        engine.submit(np.arange(5), SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
    while engine.busy:
        engine.step()
    assert runner.window.counts.units == served.layers * engine.metrics.steps > 0
    runner.close()
    # The first device of several is where whole layers are read to, before they are divided.
    print(layer, expert, part, live.most[jax.devices()[served.tensor - 1]], formula, memory(PEAK))


def fill(runner: BlockRunner) -> int:
    """Writes all pages of the KV cache: memory that is never written to is not taken. Returns the bytes of a part."""
    template = runner._template(0)
    content = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), template)
    for store in runner.parts.stores.values():
        store.write([np.arange(pages) for pages in runner.spec.pages], content)
    for part, pools in runner.parts.held.items():
        runner.parts.held[part] = jax.tree.map(lambda old: jax.device_put(np.ones(old.shape, old.dtype)), pools)
    return bytes_of(template)


if __name__ == "__main__":
    main(Served(**json.loads(sys.argv[1])), Path(sys.argv[2]))
