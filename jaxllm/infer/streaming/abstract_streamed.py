"""Abstract streamed runner: the programs of streamed layers as they are compiled, for a device that is not there."""

from __future__ import annotations

from typing import Any

import jax

from jaxllm.infer.abstract_runner import AbstractRunner
from jaxllm.infer.engine_config import EngineConfig
from jaxllm.infer.runner.program_cache import EngineProgram
from jaxllm.infer.streaming.experts.abstract_stage import AbstractExpertStage
from jaxllm.infer.streaming.layer_store import split_experts, units_of
from jaxllm.infer.streaming.open_streamed import UnitBytes
from jaxllm.infer.streaming.streamed_runner import StreamedRunner
from jaxllm.models import Functional


class AbstractStreamedRunner(AbstractRunner, StreamedRunner):
    """Description of a streamed runner's programs; it has no arrays and runs nothing.

    Args:
        model: model to serve.
        params: shapes and dtypes of its weights, layers stacked.
        config: sizes of the engine; ``pages``, ``page_size`` and ``layer_window`` are given.
        mesh: mesh of the one device.
        expert_slots: experts of each mixture on the device; 0: they go with their layers.

    Raises:
        ValueError: several devices, or no ``layer_window``; and see ``AbstractRunner``.
    """

    def __init__(
        self, model: Functional, params: Any, config: EngineConfig, mesh: jax.sharding.Mesh, *, expert_slots: int = 0
    ):
        if mesh.size > 1 or not config.layer_window:
            raise ValueError(
                f"an abstract streamed runner is of one device, with layer_window: not of {mesh.size} devices, "
                f"layer_window = {config.layer_window}."
            )
        super().__init__(model, {name: x for name, x in params.items() if name != "segments"}, config, mesh)
        self._everywhere = jax.NamedSharding(mesh, jax.P())
        self.units, self.experts = units_of(model.config.segments), None
        self._whole = {
            int(segment): jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=self._everywhere), layers
            )
            for segment, layers in params["segments"].items()
        }

        self._layers = self._whole
        if expert_slots:
            self._layers = {s: split_experts(tree)[0] for s, tree in self._whole.items()}
            experts = {
                (unit, block): one
                for unit in self.units
                for block, one in split_experts(self._whole[unit.segment])[1].items()
            }
            self.experts = AbstractExpertStage(experts, expert_slots, self._everywhere)

    def unit_bytes(self) -> list[UnitBytes]:
        """Bytes of the weights of each unit."""
        sizes = {segment: UnitBytes.of_tree(tree) for segment, tree in self._whole.items()}
        return [sizes[unit.segment] for unit in self.units]

    def largest_programs(self) -> dict[str, EngineProgram]:
        """Programs of the largest step, by name."""
        return self.programs_of(max(self.config.prompt_buckets))

    def programs_of(self, tokens: int) -> dict[str, EngineProgram]:
        """Programs of a step of so many rows, by name."""
        shape = self.shape(tokens, False, "full" in self.config.samplers)
        writes = [] if self.experts is None else self.experts.write_programs()
        return {one.name: one for one in [*writes, *self._programs_of(shape)]}
