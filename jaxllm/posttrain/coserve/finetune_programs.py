"""Compiled programs of a fine-tuning step in chunks, and the device memory that they use; none is compiled later."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

import sharding
from jaxllm.data import Batch
from jaxllm.models.param_subset import merge, select
from jaxllm.posttrain.coserve.chunked_gradients import ChunkedGradients, Place, SavedChunk
from jaxllm.posttrain.coserve.work_units import UnitKind, WorkUnit, padded_length
from jaxllm.train.frozen_base import trained_only
from jaxllm.train.objectives.objective_base import HeadObjective
from jaxllm.train.run import Run, build_value_and_grad
from jaxllm.train.run_model import saved_params, trained_params
from jaxllm.train.step.objective import make_objective
from jaxllm.train.step.step_builder import build_split_step
from jaxllm.train.step.train_state import TrainState

TIMED_RUNS = 3
"""Runs of each program before the start, the last of which are timed."""


def chunked_gradients(run: Run, chunk: int) -> ChunkedGradients:
    """Forward and backward pass of a run in chunks of ``chunk`` tokens of a row.

    Raises:
        ConfigError: the run's remat policy does not go with chunks.
    """
    objective = make_objective(run.config.objective, run.config.z_loss)
    assert isinstance(objective, HeadObjective)  # checked: "objective over several tokens"
    length = padded_length(run.config.data.seq_len, chunk)
    mask = trained_params(run.config, run.model)
    return ChunkedGradients(run.model, objective, mask, rows=1, seq_len=length, chunk=chunk)


def device_bytes(run: Run, gradients: ChunkedGradients) -> int:
    """Device memory of fine-tuning beside served weights: caches, saved residuals, gradients and the run's state."""
    state = trained_only(run.base, run.abstract)
    own = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((state.params, state.opt_state)))
    trained = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(select(gradients.mask, state.params)))
    widest = 2 if jnp.dtype(gradients.model.config.dtype).itemsize == 2 else 1  # gradients of keys are in float32
    return own * 2 + trained + gradients.cache_bytes * (1 + widest) + gradients.saved_bytes


class FinetunePrograms:
    """Programs of a run's step in chunks, on one device, with the arrays that they pass to each other.

    Args:
        run: the run, whose mesh is one device.
        gradients: its step in chunks.
        state: its train state; the base's parameters are those that the engine serves, and are not copied.

    Attributes:
        state: train state without the base.
        seconds: duration of one run of each program.
    """

    def __init__(self, run: Run, gradients: ChunkedGradients, state: TrainState):
        self.run, self.gradients = run, gradients
        self._here = SingleDeviceSharding(run.mesh.devices.flat[0])
        self._saved_mask = saved_params(run.config, run.model)
        self._base = select(jax.tree.map(lambda own: not own, self._saved_mask), state.params)
        frozen = select(jax.tree.map(lambda own: not own, gradients.mask), state.params)
        self._frozen = self._put(frozen)
        self.state = trained_only(run.base, state)
        self._trained = self._put(select(gradients.mask, state.params))
        self._batch = self.put_batch(run.data.train.batch_at(0))
        self._cache = self._put(gradients.empty_cache())
        self._of_cache = self._put(gradients.empty_cache_gradients())
        self._sums = self._put(gradients.empty_sums(self._batch))
        self._grads = self._put(jax.tree.map(jnp.zeros_like, self._trained))
        self._chunks: list[SavedChunk] = []
        self._forward, self._backward, self._update = self._compile()
        self.seconds: dict[UnitKind, float] = self._time()

    def put_batch(self, batch: Batch) -> Batch:
        """A batch on the device, its rows padded to a multiple of the chunk."""
        more = self.gradients.seq_len - batch.tokens.shape[1]
        fill = {"targets": -1}
        padded: dict[str, Any] = {
            name: None if x is None else np.pad(x, ((0, 0), (0, more)), constant_values=fill.get(name, 0))
            for name, x in batch._asdict().items()
        }
        return self._put(Batch(**padded))

    def start_step(self, batch: Batch) -> None:
        """Begins a step with a batch of ``put_batch``."""
        assert not self._chunks
        self._batch = batch

    def start(self, unit: WorkUnit) -> tuple[jax.Array, dict[str, Any]]:
        """Starts a unit; returns an array that is ready when the unit has ended, and the metrics of an update."""
        if unit.kind == "update":
            return self._end_step()
        place = Place(np.int32(unit.row), np.int32(unit.token), np.bool_(unit.fresh), np.bool_(unit.last))
        shared = self._trained, self._frozen, self._batch, place, self._cache
        if unit.kind == "forward":
            self._cache, self._sums, saved, done = self._forward(*shared, self._sums)
            self._chunks.append(saved)
        else:
            saved = self._chunks.pop()
            self._of_cache, self._grads, done = self._backward(*shared, saved, self._of_cache, self._grads)
        return done, {}

    def _end_step(self) -> tuple[jax.Array, dict[str, Any]]:
        state, metrics = self._updated(self.state)
        self.state = state
        self._trained = self._put(select(self.gradients.mask, state.params))
        return metrics["loss"], metrics

    def _updated(self, state: TrainState) -> tuple[TrainState, dict[str, Any]]:
        return self._update(self._base, state, *self._inputs())

    def _inputs(self) -> tuple[Any, ...]:
        """Batch, loss sums and gradients on the run's mesh."""
        batch = jax.device_put(self._batch, self.run.batch_sharding)
        everywhere = jax.sharding.NamedSharding(self.run.mesh, jax.P())
        sums = jax.device_put(self._sums, everywhere)
        shardings = sharding.shardings_of(select(self.gradients.mask, self.run.abstract.params))
        return batch, sums, jax.device_put(self._grads, shardings)

    def _put(self, tree: Any) -> Any:
        return jax.device_put(tree, self._here)

    def _compile(self) -> tuple[Callable[..., Any], ...]:
        run, gradients = self.run, self.gradients
        options: Any = run.compiler_options or None

        def forward(*inputs: Any) -> tuple[Any, ...]:
            return (*gradients.forward(*inputs), inputs[3].token + 1)

        def backward(*inputs: Any) -> tuple[Any, ...]:
            return (*gradients.backward(*inputs), inputs[3].token + 1)

        place = Place(np.int32(0), np.int32(0), np.bool_(True), np.bool_(True))
        shared = self._trained, self._frozen, self._batch, place, self._cache
        first = jax.jit(forward, donate_argnums=4).lower(*shared, self._sums)
        saved = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._here), first.out_info[2])
        then = jax.jit(backward, donate_argnums=(6, 7)).lower(*shared, saved, self._of_cache, self._grads)
        split = build_split_step(
            run.config, run.model, build_value_and_grad(run.config, run.model, run.mesh), run.optimizer
        )

        def update(base: Any, state: TrainState, batch: Batch, sums: Any, grads: Any) -> Any:
            whole = replace(state, params=merge(state.params, base))
            new, metrics = split.update(whole, batch, (sums, grads))
            return replace(new, params=select(self._saved_mask, new.params)), metrics

        abstract = trained_only(run.base, run.abstract)
        with jax.set_mesh(run.mesh):
            jitted = jax.jit(update, out_shardings=(sharding.shardings_of(abstract), None))
            last = jitted.lower(self._base, self.state, *self._inputs())
            programs = [one.compile(compiler_options=options) for one in (first, then, last)]
        return tuple(programs)

    def _time(self) -> dict[UnitKind, float]:
        """Runs each program, whose results are not used; seconds of the fastest run."""
        found: dict[UnitKind, float] = {}
        size = self.gradients.chunk * self.gradients.rows
        kinds: tuple[UnitKind, ...] = ("forward", "backward", "update")
        for _ in range(TIMED_RUNS):
            for kind in kinds:
                began = time.monotonic()
                if kind == "update":
                    done = self._updated(self.state)[1]["loss"]
                else:
                    done, _ = self.start(WorkUnit(kind, fresh=True, last=True, tokens=size))
                jax.block_until_ready(done)
                spent = time.monotonic() - began
                found[kind] = min(found.get(kind, spent), spent)
        return found


class UnitsInFlight:
    """Units that were started and have perhaps not ended: (array that is ready at the end) of each.

    Attributes:
        marked: the last unit before the last mark.
    """

    def __init__(self) -> None:
        self._last: Any = None
        self._marks: deque[Any] = deque([None], maxlen=1)

    def add(self, done: jax.Array) -> None:
        """Adds a unit."""
        self._last = done

    def mark(self) -> None:
        """Marks the units so far."""
        self._marks.append(self._last)

    @property
    def behind(self) -> bool:
        """Whether a unit before the last mark still runs."""
        marked = self._marks[0]
        return marked is not None and not marked.is_ready()
