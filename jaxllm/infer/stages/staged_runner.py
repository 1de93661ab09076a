"""Staged runner: a model runner whose layers are cut into pipeline stages, each on devices of its own.

The mesh's ``stage`` axis is split into sub-meshes. A stage has its layers' weights and KV cache pages, and a program of
its own for each shape of a step; only hidden states go from stage to stage. Programs are started without waiting for
their inputs, so that while a stage computes one step, the stage before it computes the next (the non-blocking pipeline
of EnergonAI, arXiv:2209.02341). Every stage computes the steps in the order in which they were started, so what a step
reads of the KV cache, the steps before it have written.

With ``draft_runs`` a stage is told to compute a step when it is idle and not before, so that a step whose drafts turned
out wrong is cancelled at the next stage (early inference cancellation of PipeInfer, arXiv:2407.11798).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import sharding
from jaxllm.config import ConfigError
from jaxllm.infer.engine_config import EngineConfig
from jaxllm.infer.runner.model_runner import PAGES_PER_TRANSFER, ModelRunner
from jaxllm.infer.runner.page_programs import Pools, empty_pools, read_pages, write_pages
from jaxllm.infer.runner.paged_cache import POOL_AXES, TRANSFER_AXES, LayerGroup
from jaxllm.infer.runner.program_cache import EngineProgram, config_key
from jaxllm.infer.runner.serving_mesh import check_stages, put, serving_model, stages_of
from jaxllm.infer.runner.step.step_shape import StepShape
from jaxllm.infer.stages.pipeline_clock import DeviceClock, PipelineClock
from jaxllm.infer.stages.pipeline_stage import PipelineStage
from jaxllm.infer.stages.stage_cut import cut_stages
from jaxllm.infer.stages.stage_step import HIDDEN_AXES, StageStep
from jaxllm.models import Functional
from jaxllm.models.packed_weight import batch_dependent_formats
from pallas_kernels.paged_attention import Slots


@dataclass
class StageCounts:
    """Counts of a staged runner.

    Attributes:
        steps: steps that were started.
        stage_steps: steps that stages were told to compute, each counted once for each stage.
        cancelled_steps: steps that were cancelled in flight.
        saved_stage_steps: stages that did not compute them, counted in the same way.
    """

    steps: int = 0
    stage_steps: int = 0
    cancelled_steps: int = 0
    saved_stage_steps: int = 0


@dataclass(eq=False)
class StagedResult:
    """Result of a step that travels through the stages; ``np.asarray`` of it waits: int32[1, elements].

    Attributes:
        runner: runs the step.
        shape, packed, masks: see ``Runner.run``.
        stage: number of stages that have been told to compute it.
        value: hidden states of the last of them, and in the end the packed outputs.
        ticket: of the pipeline clock, for the last of them.
        dropped: its result is never read.
    """

    runner: StagedRunner
    shape: StepShape
    packed: np.ndarray
    masks: np.ndarray | None
    stage: int = 0
    value: Any = None
    ticket: Any = None
    dropped: bool = False

    def is_ready(self) -> bool:
        """Whether the result is there; starts on the stages whatever may start by now."""
        return self.runner.is_ready(self)

    def cancel(self) -> None:
        """Cancels the step: no further stage computes it, and its result is never read."""
        self.runner.cancel(self)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Packed outputs; waits for them. Arguments as numpy gives them."""
        self.runner.wait(self)
        return np.asarray(self.value, dtype)


class StagedRunner(ModelRunner):
    """Runner of a model in pipeline stages; see ``ModelRunner``.

    Args:
        model, params: model and all of its weights.
        config: sizes of the engine, with ``stages``.
        mesh: mesh with a ``stage`` axis, and perhaps ``tensor``.
        options: of ``ModelRunner``.

    Raises:
        ValueError: the model has too few layers, or weights that do not go with the configuration.
        ShardingError: the mesh has other axes, or devices of several processes.

    Attributes:
        stages: the stages; the head and the sampler are on the devices of the last.
        counts: what the stages were told to compute.
        clock: says when they have computed it.
        cancels: steps can be cancelled in flight; False: they flow through all stages, to measure what that costs.
    """

    def __init__(
        self, model: Functional, params: Any, config: EngineConfig, *, mesh: Mesh | None = None, **options: Any
    ):
        if mesh is None or stages_of(mesh) != config.stages:
            raise ValueError(f"stages = {config.stages}, and the mesh has stage = {stages_of(mesh)}; give both alike.")
        check_stages(mesh)
        if config.batch_invariant and (found := batch_dependent_formats(params)):
            raise ValueError(
                f"batch_invariant does not go with {found[0]}: an input is an outlier by any token of a step."
            )
        cuts = cut_stages(model.config.segments, config.stages)
        self.stages = [PipelineStage.of(mesh, number, layers) for number, layers in enumerate(cuts)]
        self.counts, self.cancels = StageCounts(), True
        self.clock: PipelineClock = DeviceClock()
        self._moving: deque[StagedResult] = deque()  # not started on all stages
        self._unread: list[StagedResult] = []  # started on all stages
        self._lazy = config.draft_runs > 1
        self._whole = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        ends = self._place(serving_model(model), params)
        most = max(_bytes_of(stage.weights) for stage in self.stages)
        options["reserved_bytes"] = options.get("reserved_bytes", 0) + most
        super().__init__(model, ends, config, mesh=self.stages[-1].mesh, **options)
        self.params = self._all_weights(ends)

    def _place(self, model: Functional, params: Any) -> Any:
        """Copies each stage's weights to its devices; returns those of the head, on the last stage."""
        there = getattr(getattr(jax.tree.leaves(params)[0], "sharding", None), "mesh", None)
        with sharding.use_mesh(there if there is not None and there.size > 1 else None):
            for stage in self.stages:
                stage.weights = {"layers": stage.layer_weights(model, params)}
        first, last = self.stages[0], self.stages[-1]
        first.weights |= first.copied(model, {"embedding": params["embedding"]})
        names = ("embedding", "head") if model.config.tied else ("head",)
        return last.copied(model, {name: params[name] for name in names})

    def _all_weights(self, ends: Any) -> Any:
        return (
            ends
            | {n: tree for stage in self.stages for n, tree in stage.weights.items() if n != "layers"}
            | {"layers": tuple(stage.weights["layers"] for stage in self.stages)}
        )

    # Steps

    def use_clock(self, clock: PipelineClock) -> None:
        """Uses another clock, such as a simulated one, from the next step on; no step may be in flight."""
        self.clock = clock
        for stage in self.stages:
            stage.busy = None

    def run(self, shape: StepShape, packed: np.ndarray, masks: np.ndarray | None = None) -> StagedResult:
        """Starts a step on the first stage, and on the others as soon as may be; see ``Runner``."""
        result = StagedResult(self, shape, packed, masks)
        self._moving.append(result)
        self.counts.steps += 1
        self._advance()
        return result

    def is_ready(self, result: StagedResult) -> bool:
        """Whether a step's result is there."""
        if not self._is_done(result):
            self._advance()
        return self._is_done(result)

    def _is_done(self, result: StagedResult) -> bool:
        return result.stage == len(self.stages) and self.clock.is_done(result.ticket)

    def wait(self, result: StagedResult) -> None:
        """Waits for a step's result; the steps behind it go on meanwhile."""
        while not self.is_ready(result):
            if not self._lazy:
                self.clock.wait_any([result.ticket])
                continue
            busy = [stage.busy for stage in reversed(self.stages) if stage.busy is not None]
            if pending := [ticket for ticket in busy if not self.clock.is_done(ticket)]:
                self.clock.wait_any(pending)
        if result in self._unread:
            self._unread.remove(result)

    def cancel(self, result: StagedResult) -> None:
        """Cancels a step on the stages that have not been told to compute it."""
        result.dropped = True
        if result in self._unread:
            self._unread.remove(result)
        elif self.cancels and result in self._moving:
            self._moving.remove(result)
            self.counts.cancelled_steps += 1
            self.counts.saved_stage_steps += len(self.stages) - result.stage

    def _advance(self, *, all_stages: bool = False) -> None:
        """Starts every step on the stages that may compute it now, the oldest first; or on all.

        Not while there is a result that the host has not read, by which steps behind may be cancelled.
        """
        if self._lazy and not all_stages and any(self._is_done(result) for result in self._unread):
            return
        ahead = len(self.stages)  # how many stages the step before has been started on
        for result in list(self._moving):
            while result.stage < ahead and (all_stages or self._may_start(result)):
                self._start(result)
            ahead = result.stage
            if ahead == len(self.stages):
                self._moving.remove(result)
                if not result.dropped:
                    self._unread.append(result)

    def _may_start(self, result: StagedResult) -> bool:
        """Whether the next stage may be told to compute a step: at any time, unless it may yet be cancelled."""
        if not self._lazy:
            return True
        tickets = result.ticket, self.stages[result.stage].busy
        return all(ticket is None or self.clock.is_done(ticket) for ticket in tickets)

    def _start(self, result: StagedResult) -> None:
        """Starts a step on its next stage."""
        stage, shape = self.stages[result.stage], result.shape
        rules = self.model.rules
        with sharding.use_mesh(stage.mesh):
            packed = put(result.packed, stage.sharding(rules, "batch"))
            hidden = ()
            if stage.number:
                hidden = (jax.device_put(result.value, stage.sharding(rules, *HIDDEN_AXES)),)
            program = self.programs[_name(shape, stage)]
            if stage is not self.stages[-1]:
                stage.pools, result.value = program(stage.weights, stage.pools, *hidden, packed)
            else:
                arguments = self._weights, stage.weights, stage.pools, *hidden, self.last, packed
                if shape.full:
                    masks = result.masks
                    legal = self.all_tokens(shape) if masks is None else put(masks, stage.sharding(rules, "batch"))
                    stage.pools, self.last, result.value, self.state = program(*arguments, self.state, legal)
                else:
                    stage.pools, self.last, result.value = program(*arguments)
                result.value.copy_to_host_async()
        tokens = int(shape.inputs.views(result.packed[0])["starts"][-1])
        stage.busy = result.ticket = self.clock.started(stage.number, tokens, result.ticket, result.value)
        self.counts.stage_steps += 1
        result.stage += 1

    def seat(self, replica: int, packed: np.ndarray) -> None:
        """Writes a request's logits-processor state into its slot, behind the steps that use the slot's former one."""
        self._advance(all_stages=True)
        super().seat(replica, packed)

    # Weights

    @property
    def _expected(self) -> Any:
        return self._whole

    def swap(self, params: Any) -> None:
        """Replaces the weights, for the same programs; see ``ModelRunner``."""
        self.check(params)
        self._advance(all_stages=True)
        self._weights = self._place(self.model, params)
        self.params = self._all_weights(self._weights)

    # Swapping pages to the host

    def read(self, replica: int, group: int, pages: list[int]) -> Slots:
        """Copies pages of all stages to the host, when the steps that write them have been started."""
        self._advance(all_stages=True)
        parts = []
        for stage in self._stages_of(group):
            for at in range(0, len(pages), PAGES_PER_TRANSFER):
                some = pages[at : at + PAGES_PER_TRANSFER]
                with sharding.use_mesh(stage.mesh):
                    program = self.programs[f"read-{group}-stage-{stage.number}"]
                    found = program(stage.pools[group], self._padded_on(stage, some, group))
                parts.append((stage.number, jax.tree.map(lambda x, some=some: np.asarray(x)[:, : len(some)], found)))
        if not parts:
            return Slots(np.empty(0))
        rows = [
            jax.tree.map(lambda *x: np.concatenate(x, axis=1), *(part for number, part in parts if number == stage))
            for stage in sorted({number for number, _ in parts})
        ]
        return jax.tree.map(lambda *x: np.concatenate(x), *rows)

    def write(self, replica: int, group: int, pages: list[int], content: Slots) -> None:
        """Copies pages from the host into the pools of all stages."""
        self._advance(all_stages=True)
        row = 0
        for stage in self._stages_of(group):
            rows = slice(row, row + stage.groups[group].rows)
            row = rows.stop
            for at in range(0, len(pages), PAGES_PER_TRANSFER):
                some = pages[at : at + PAGES_PER_TRANSFER]
                rest = ((0, 0), (0, PAGES_PER_TRANSFER - len(some)), *((0, 0),) * 3)
                part = slice(at, at + PAGES_PER_TRANSFER)
                held = jax.tree.map(lambda x, rows=rows, part=part, rest=rest: np.pad(x[rows, part], rest), content)
                place = stage.sharding(self.model.rules, *TRANSFER_AXES)
                with sharding.use_mesh(stage.mesh):
                    placed = jax.tree.map(lambda x, place=place: put(x, place), held)
                    program = self.programs[f"write-{group}-stage-{stage.number}"]
                    pool = program(stage.pools[group], self._padded_on(stage, some, group), placed)
                stage.pools = (*stage.pools[:group], pool, *stage.pools[group + 1 :])

    def _stages_of(self, group: int) -> list[PipelineStage]:
        """Stages that have layers of a group."""
        return [stage for stage in self.stages if stage.groups[group].layers]

    def _padded_on(self, stage: PipelineStage, pages: list[int], group: int) -> Any:
        padded = np.full((1, PAGES_PER_TRANSFER), self.spec.pages[group], np.int32)
        padded[0, : len(pages)] = pages
        return put(padded, stage.sharding(self.model.rules, "batch"))

    # Sizes

    @property
    def _device_count(self) -> int:
        return sum(len(stage.devices) for stage in self.stages)

    def _page_bytes(self, group: LayerGroup) -> int:
        """Bytes of a page on a device of the stage with the most layers of the group."""
        bytes_of = super()._page_bytes
        return max(bytes_of(stage.groups_of([group])[0]) for stage in self.stages)

    # Programs

    def _programs_of(self, shape: StepShape) -> list[EngineProgram]:
        """See ``ModelRunner``: one program for each stage."""
        rules, whole, found = self.model.rules, self._step(shape), []
        inputs, hidden = self._abstract_inputs(shape), None
        for stage in self.stages:
            place = stage.sharding(rules, "batch")
            packed = jax.ShapeDtypeStruct(inputs["packed"].shape, jnp.int32, sharding=place)
            step = StageStep(dataclasses.replace(whole, groups=stage.groups_of(self.spec.groups)), stage.layers)
            arguments = {"weights": _abstract(stage.weights), "pools": self._abstract_pools_of(stage)}
            if hidden is not None:
                there = stage.sharding(rules, *HIDDEN_AXES)
                arguments["hidden"] = jax.ShapeDtypeStruct(hidden.shape, hidden.dtype, sharding=there)
            run, donated = (step.middle if stage.number else step.begin), ("pools",)
            if stage is self.stages[-1]:
                arguments = {"ends": self._abstract_weights, **arguments, "last": inputs["last"], "packed": packed}
                arguments |= {name: inputs[name] for name in ("state", "masks") if name in inputs}
                run, donated = step.end, ("pools", "last", "state")
            else:
                arguments["packed"] = packed
                with sharding.use_mesh(stage.mesh):
                    _, hidden = jax.eval_shape(run, *arguments.values())
            key = [config_key(shape), str(stage.layers)]
            found.append(EngineProgram(_name(shape, stage), run, arguments, donated, key, stage.devices))
        return found

    @functools.cached_property
    def _program_names(self) -> dict[StepShape, list[str]]:
        return {shape: [_name(shape, stage) for stage in self.stages] for shape in self._shapes}

    def _transfer_programs(self) -> list[EngineProgram]:
        """See ``ModelRunner``: of each stage that has layers of a group."""
        programs, rules = [], self.model.rules
        for stage in self.stages:
            stage_pools, place = self._abstract_pools_of(stage), stage.sharding(rules, *TRANSFER_AXES)
            where = stage.sharding(rules, "batch")
            pages = jax.ShapeDtypeStruct((1, PAGES_PER_TRANSFER), jnp.int32, sharding=where)
            for group, pool in enumerate(stage_pools):
                if not stage.groups_of(self.spec.groups)[group].layers:
                    continue
                held = jax.tree.map(
                    lambda x, place=place: jax.ShapeDtypeStruct(
                        (x.shape[0], PAGES_PER_TRANSFER, *x.shape[2:]), x.dtype, sharding=place
                    ),
                    pool.in_pages(),
                )
                for name, function, further, donated in (
                    ("read", read_pages, {}, ()),
                    ("write", write_pages, {"held": held}, ("pool",)),
                ):
                    arguments = {"pool": pool, "pages": pages, **further}
                    made, run = f"{name}-{group}-stage-{stage.number}", self._by_rules(function)
                    programs.append(EngineProgram(made, run, arguments, donated, devices=stage.devices))
        return programs

    def _pools_of(self, stage: PipelineStage) -> Pools:
        """Empty page pools of a stage."""
        spec, groups = self.spec, stage.groups_of(self.spec.groups)
        return empty_pools(self.model.rules, groups, spec.pages, spec.page_size, self.config.max_sequences)

    def _abstract_pools_of(self, stage: PipelineStage) -> Pools:
        with sharding.use_mesh(stage.mesh):
            shapes = jax.eval_shape(functools.partial(self._pools_of, stage))
        place = stage.sharding(self.model.rules, *POOL_AXES)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes)

    @property
    def pools(self) -> Pools:
        """Page pools of all stages, one after the other."""
        return tuple(pool for stage in self.stages for pool in stage.pools)

    def _make_pools(self) -> None:
        for stage in self.stages:
            stage.groups = stage.groups_of(self.spec.groups)
            there = stage.sharding(self.model.rules) if stage.mesh is None else None
            with sharding.use_mesh(stage.mesh):
                make = jax.jit(functools.partial(self._pools_of, stage), out_shardings=there)
                stage.pools = tuple(jax.block_until_ready(make()))


def with_stages(config: EngineConfig, mesh: Mesh | None) -> EngineConfig:
    """Configuration of an engine on a mesh, with as many ``stages`` as the mesh has.

    Raises:
        ValueError: it has another number of stages already; or it has ``draft_runs`` and the mesh has no stages.
    """
    count = stages_of(mesh)
    if config.stages not in (1, count):
        raise ConfigError(f"engine: stages = {config.stages}, and the mesh has stage = {count}; give the mesh alone.")
    if config.draft_runs > 1 and count == 1:
        raise ConfigError(
            f"engine: draft_runs = {config.draft_runs} are runs in flight through pipeline stages, and there is one "
            "stage: serve on a mesh with stage=N (--mesh stage=4), or leave draft_runs out."
        )
    return dataclasses.replace(config, stages=count)


def _name(shape: StepShape, stage: PipelineStage) -> str:
    return f"{shape.name}-stage-{stage.number}"


def _abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def _bytes_of(tree: Any) -> int:
    """Bytes of a tree of arrays on one device."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))
