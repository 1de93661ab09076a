"""Streamed runner: a model runner whose layers come to the device while they compute, a few at a time.

A step with many sequences reads each layer once for all of them (ZeRO-Inference, arXiv:2207.00032). Steps are made of
the programs of ``StreamedStep``. Decode tokens go through the programs of steps with prefill, one a
step: a loop on the device would need all layers.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import numpy as np

from jaxllm.config import ConfigError
from jaxllm.infer.engine_config import EngineConfig
from jaxllm.infer.runner.model_runner import ModelRunner
from jaxllm.infer.runner.program_cache import EngineProgram, config_key
from jaxllm.infer.runner.runner_protocol import StepFailedError
from jaxllm.infer.runner.serving_mesh import put
from jaxllm.infer.runner.step.step_shape import StepShape
from jaxllm.infer.streaming.experts.expert_stage import ExpertStage
from jaxllm.infer.streaming.layer_store import Unit
from jaxllm.infer.streaming.layer_window import read_unit
from jaxllm.infer.streaming.sharded_layers import over_mesh
from jaxllm.infer.streaming.streamed_step import StreamedStep
from jaxllm.infer.streaming.streamed_weights import StreamedWeights, WeightPlacement
from jaxllm.infer.streaming.weight_file import TierUnavailableError
from jaxllm.models import Functional
from jaxllm.models.packed_weight import batch_dependent_formats


class StreamedRunner(ModelRunner):
    """Runner of a model on devices that need not hold its weights; see ``ModelRunner``.

    Args:
        model: the model.
        params: its parameters outside of blocks.
        config: sizes of the engine, with ``layer_window``.
        weights: all of its weights, and where they are.
        options: of ``ModelRunner``.

    Raises:
        ValueError: settings that streamed weights do not go with; names them.

    Attributes:
        window: the units on the device.
        experts: slots of experts; None: experts go with their layers.
    """

    def __init__(
        self, model: Functional, params: Any, config: EngineConfig, *, weights: StreamedWeights, **options: Any
    ):
        device = next(iter(jax.tree.leaves(params)[0].devices()))
        place: jax.sharding.Sharding = jax.sharding.SingleDeviceSharding(device)
        if (mesh := options.get("mesh")) is not None and mesh.size > 1:
            weights, device = over_mesh(weights, model, mesh), mesh.devices.flat[0]
            place = jax.NamedSharding(mesh, jax.P())
        self._everywhere = place
        self._placed, self._kv_bytes = repr(weights.placement), weights.placement.kv_bytes
        self.units = weights.units
        self._broken: BaseException | None = None
        self._layers = _abstract_layers(weights, device)
        self.window = weights.window(device)
        self.experts: ExpertStage | None = None
        if weights.experts:
            self.experts = ExpertStage(weights.experts, weights.placement, place, config.max_batched_tokens)
        if config.batch_invariant and (found := batch_dependent_formats(self._layers)):
            raise ValueError(
                f"batch_invariant does not go with {found[0]}: an input is an outlier by any token of a step."
            )
        of_unit = max(
            sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))
            for tree in self._layers.values()
        )
        options["reserved_bytes"] = (
            options.get("reserved_bytes", 0)
            + self.window.resident_bytes
            + self.window.size * of_unit
            + (0 if self.experts is None else self.experts.bytes)
        )
        try:
            super().__init__(model, params, config, **options)
        except BaseException:
            self.window.close()
            raise
        blocks = model.config.layers
        self._numbers = [put(np.int32(number), self._everywhere) for number in range(blocks)]

    @property
    def _page_key(self) -> list[str]:
        return [self._placed]

    @property
    def _most_page_bytes(self) -> float:
        return math.inf if self._kv_bytes is None else self._kv_bytes

    def _programs(self) -> tuple[list[EngineProgram], int]:
        programs, first = super()._programs()
        writes = [] if self.experts is None else self.experts.write_programs()
        return [*writes, *programs], first + len(writes)

    def _programs_of(self, shape: StepShape) -> list[EngineProgram]:
        """See ``ModelRunner``: the beginning of a step, one repeat of each segment, and the end."""
        step, inputs, key = StreamedStep(self._step(shape)), self._abstract_inputs(shape), config_key(shape)
        ends, pools = self._abstract_weights, self._abstract_pools()
        place = self._everywhere
        one = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree)  # noqa: E731
        begin = {"params": ends, "pools": pools, "last": inputs["last"], "packed": inputs["packed"]}
        with self._on_mesh():
            _, batch, hidden, evicted = one(jax.eval_shape(step.begin, *begin.values()))
        programs = [EngineProgram(f"{shape.name}-begin", step.begin, begin, ("pools",), key)]
        around = {"params": ends, "pools": pools, "batch": batch, "hidden": hidden}
        for segment, weights in self._layers.items():
            for part, of_part in self._parts(segment, weights):
                if self.experts is not None and part is not None and self.experts.has(segment, part):
                    around["weights"] = of_part
                    with self._on_mesh():
                        programs += self.experts.programs(shape.name, step, segment, part, around, key)
                    continue
                arguments = {
                    "params": ends, "weights": of_part, "pools": pools, "batch": batch, "hidden": hidden,
                    "first": jax.ShapeDtypeStruct((), np.int32, sharding=place),
                }  # fmt: skip
                name = _part_name(shape, segment, part)
                programs.append(EngineProgram(name, _Group(step, segment, part), arguments, ("pools",), key))
        last = {"params": ends, "pools": pools, "hidden": hidden, "last": inputs["last"], "packed": inputs["packed"]}
        last |= {"evicted": evicted, **{n: inputs[n] for n in ("state", "masks") if n in inputs}}
        return [*programs, EngineProgram(f"{shape.name}-end", step.end, last, ("pools", "last", "state"), key)]

    def run(self, shape: StepShape, packed: np.ndarray, masks: np.ndarray | None = None) -> Any:
        """Runs the layers as their weights arrive, and starts the end of the step; see ``ModelRunner``.

        Raises:
            StepFailedError: a layer's weights or KV cache cannot be read. The next step reads them again.
            RuntimeError: a step was broken off before by something else, such as Ctrl-C.
        """
        if self._broken is not None:
            raise RuntimeError(
                "a step was broken off, and the KV cache may be lost: build the engine again."
            ) from self._broken
        try:
            with self._on_mesh():
                return self._run(shape, packed, masks)
        except TierUnavailableError as error:
            # It was raised between two programs: the pools are those that the last one has returned.
            self.window.restart()
            raise StepFailedError(str(error), error.code) from error
        except BaseException as error:
            self._broken = error
            raise

    def _run(self, shape: StepShape, packed: np.ndarray, masks: np.ndarray | None) -> Any:
        sent = put(packed, self._per_replica)
        pools, batch, hidden, evicted = self.programs[f"{shape.name}-begin"](self._weights, self.pools, self.last, sent)
        self.pools = pools
        tokens = int(shape.inputs.views(packed[0])["starts"][-1])
        for place, unit in enumerate(self.units):
            weights = self.window.take(unit)
            parts = self._parts(unit.segment, weights)
            for at, (part, own) in enumerate(parts):
                number = self._numbers[unit.first + at]
                if self.experts is not None and part is not None and self.experts.has(unit.segment, part):
                    given = self._weights, own, self.pools, batch, hidden
                    self.pools, routed = self.experts.route(
                        self.programs,
                        shape.name,
                        unit,
                        part,
                        number,
                        given,
                        tokens,
                        functools.partial(self._following, place, parts[at + 1 :]),
                    )
                    hidden = self.experts.compute(self.programs, routed)
                else:
                    program = self.programs[_part_name(shape, unit.segment, part)]
                    self.pools, hidden = program(self._weights, own, self.pools, batch, hidden, number)
            self.window.give_back(unit, hidden)
        arguments = self._weights, self.pools, hidden, self.last, sent, evicted
        if shape.full:
            legal = self.all_tokens(shape) if masks is None else put(masks, self._per_replica)
            self.pools, self.last, out, self.state = self.programs[f"{shape.name}-end"](*arguments, self.state, legal)
        else:
            self.pools, self.last, out = self.programs[f"{shape.name}-end"](*arguments)
        out.copy_to_host_async()
        return out

    def _parts(self, segment: int, weights: Any) -> list[tuple[str | None, Any]]:
        """Parts of a unit that programs compute: all of it (None), or block by block where some have expert slots."""
        if self.experts is None or not any(self.experts.has(segment, b) for b in weights):
            return [(None, weights)]
        return [(b, weights[b]) for b in sorted(weights, key=int)]

    def _following(self, place: int, rest: list[tuple[str | None, Any]]) -> tuple[Unit, str, Any] | None:
        """The next mixture layer, if its router's weights are on the device: in ``rest`` of a unit, or of the next."""
        assert self.experts is not None
        nearby = [(self.units[place], rest)]
        if place + 1 < len(self.units) and (held := self.window.there(self.units[place + 1])) is not None:
            nearby.append((self.units[place + 1], self._parts(self.units[place + 1].segment, held)))
        for unit, parts in nearby:
            for part, own in parts:
                if part is not None and self.experts.has(unit.segment, part):
                    return unit, part, own
        return None

    def counters(self) -> dict[str, int]:
        """Counters of reads, waits and expert slots since the start, by name."""
        seen = self.window.counts
        found = {"layer_stalls": seen.stalls, "layer_stalled_milliseconds": round(1e3 * seen.stalled_seconds)}
        found["layer_read_failures"] = seen.failures
        for tier in sorted(seen.reads):
            found |= {f"layer_reads_{tier}": seen.reads[tier], f"layer_read_bytes_{tier}": seen.read_bytes[tier]}
        if self.experts is not None:
            of = self.experts.counts
            found |= {"experts_wanted": of.wanted, "expert_hits": of.hits, "expert_loads": of.loads}
            found |= {"expert_load_bytes": of.load_bytes, "expert_predictions": of.predicted}
            found |= {"expert_prediction_hits": of.predicted_hits, "experts_on_host": of.on_host}
            found["expert_read_failures"] = of.failures
            for files in self.experts.files:
                seen = files.counts
                found |= {"expert_reads_disk": seen.reads, "expert_read_bytes_disk": seen.read_bytes}
                found["expert_reads_host"] = seen.from_host
        return found

    def swap(self, params: Any) -> None:
        """Streamed weights are not replaced while they are served.

        Raises:
            ValueError: always.
        """
        raise ValueError("streamed weights cannot be replaced while they are served; load the new model instead.")

    def close(self) -> None:
        """Ends the threads that read layers."""
        self.window.close()
        if self.experts is not None:
            self.experts.close()


def check_streamed(config: EngineConfig, placement: WeightPlacement | None) -> None:
    """Checks what goes with streamed weights.

    Args:
        config: sizes of the engine.
        placement: of its weights; None: they are on the device.

    Raises:
        ValueError: names what does not.
    """
    window = 0 if placement is None else placement.window
    if config.layer_window != window:
        raise ConfigError(
            f"engine: layer_window = {config.layer_window}, and the weights are placed with a window of {window}; give "
            "both the same number (0: all weights are on the device)."
        )
    if not window:
        return
    if config.batch_invariant and placement is not None and placement.absent != "load":
        raise ConfigError(
            f"engine: batch_invariant does not go with absent = {placement.absent!r}, by which other requests decide "
            "whether an expert computes on the host's processor or on the device, which round differently; leave one "
            "of them out."
        )
    if config.orders_channels:
        raise ConfigError(
            f"engine: kv_dtype = {config.kv_dtype!r} reorders the weights, which are streamed; use kivi4."
        )
    if (config.speculate or "").partition(":")[0] == "self":
        raise ConfigError(
            f"engine: speculate = {config.speculate!r} drafts with the model's own layers, which are streamed; use "
            "draft:MODEL, tree:MODEL,BUDGET or ngram."
        )


def _abstract_layers(weights: StreamedWeights, device: jax.Device) -> dict[int, Any]:
    """Shapes of the weights of a unit of each segment, of which all units are alike; read before any has a place."""
    found: dict[int, Any] = {}
    for unit in weights.units:
        if unit.segment not in found:
            found[unit.segment] = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
                read_unit(weights.stores[unit], unit, device),
            )
    return found


class _Group:
    """``StreamedStep.group`` of a segment, or of one block of its repeats, whose donated arguments have positions."""

    def __init__(self, step: StreamedStep, segment: int, block: str | None):
        self.step, self.segment, self.block = step, segment, block

    def __call__(self, params: Any, weights: Any, pools: Any, batch: Any, hidden: Any, first: Any) -> Any:
        """See ``StreamedStep.group``."""
        return self.step.group(self.segment, params, weights, pools, batch, hidden, first, self.block)


def _part_name(shape: StepShape, segment: int, block: str | None) -> str:
    return f"{shape.name}-layers-{segment}" + ("" if block is None else f"-{block}")
