"""Training step whose parameters are streamed: the device holds few layers at a time, the tier's files hold all.

Forward, each layer is read ahead of its use, and its input is saved (``saved_inputs``), with the named values that
``model.remat`` saves (``layer_values``). Backward, each layer is computed again from these, and is updated and written
as soon as its gradients are there (Fuyou, arXiv:2403.06504). So neither all parameters nor all gradients nor all
optimizer state of layers are ever on the device (ZeRO-Infinity, arXiv:2104.07857). A layer is read once for all
micro-batches in each direction: layer-major order (Harmony, arXiv:2202.01306). Gradients are clipped by a norm that a
backward pass without updates has found before, as LOMO's paper proposes (arXiv:2306.09782). What is outside of layers
stays on the device: embedding, output matrix, final norm.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxllm.train.disk.disk_step import part_of
from jaxllm.train.disk.hidden_share import PassTimer
from jaxllm.train.disk.io_timeline import IoTimeline
from jaxllm.train.disk.saved_inputs import DiskInputs, SavedInputs, local_bytes, to_device, to_host
from jaxllm.train.disk.state_files import StateFiles
from jaxllm.train.disk.streamed_programs import StreamedModel, StreamedPrograms
from jaxllm.train.step.train_state import TrainState

IN_FLIGHT = 2
"""Programs of layers that are dispatched and not done: one runs while the arguments of the next are copied. More would
only hold more memory."""


class Dispatched:
    """Results of the last programs that were dispatched; waits so that there are no more than ``IN_FLIGHT``.

    Args:
        timeline: told of each program; None: nobody is.
    """

    def __init__(self, timeline: IoTimeline | None = None) -> None:
        self._results: deque[Any] = deque()
        self._timeline = timeline

    def run(self, program: Callable[..., Any], *given: Any, watched: int | None = None) -> Any:
        """Dispatches a program, counts it, and returns its results.

        Args:
            program: compiled.
            given: its arguments.
            watched: place of a result that no later program is given to overwrite (donated); None: there is one result.
        """
        begin = time.monotonic()
        results = program(*given)
        result = results if watched is None else results[watched]
        self._results.append(result)
        if self._timeline is not None:
            self._timeline.dispatched(result, begin)
        if len(self._results) > IN_FLIGHT:
            jax.block_until_ready(self._results.popleft())
        return results

    def waiting(self) -> Any:
        """Function that returns when the programs that have been dispatched so far are done."""
        results = list(self._results)
        return lambda: jax.block_until_ready(results)


class LayerStreamStep:
    """Compiled training step with parameters and optimizer state in files, ``(state, batch) -> (state, metrics)``.

    Args:
        programs: compiled.
        of: model, with the files of the parameters.
        files: of the optimizer state.
        inputs: where the inputs of layers are saved.

    Attributes:
        inputs: as given.
        say: called with lines for the log.
        timeline: of the steps that come; None: none is kept.
    """

    def __init__(self, programs: StreamedPrograms, of: StreamedModel, files: StateFiles, inputs: SavedInputs):
        self._programs, self._of, self._files, self.inputs = programs, of, files, inputs
        self._numbers = {unit: number for number, unit in enumerate(files.units)}
        self._steps_to_choice = 2 if isinstance(inputs, DiskInputs) and inputs.adaptive else 0
        self.say: Callable[[str], object] = lambda line: None
        self.timeline: IoTimeline | None = None

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """The state after the step, and its metrics; parameters outside of layers are donated.

        The metrics ``disk_read_bytes`` and ``disk_written_bytes`` are what the tier read and wrote in the step; where
        chunks stay in the host's memory, ``disk_kept_bytes`` is what it did not read because of that.

        Raises:
            DiskTierError: the files failed; the state is lost then.
        """
        programs, of, params, files, saved = self._programs, self._of, self._of.params, self._files, self.inputs
        tiers = [params.tier, files.tier, *([saved.tier] if isinstance(saved, DiskInputs) else [])]
        moved = {what: -sum(tier.moved[what] for tier in tiers) for what in ("read", "write", "kept")}
        layers, timer = list(range(len(params.units))), None
        if self._steps_to_choice == 1:
            timer = PassTimer(tiers, tiers[:2])
        chunks = None if self._steps_to_choice else params.chunks  # there are other saved inputs after the choice
        self._steps_to_choice = max(0, self._steps_to_choice - 1)
        waiting = 0
        if chunks is not None:
            chunks.begin(lambda: saved.host_bytes + waiting)
        params.tier.begin([*layers, *[*reversed(layers)] * (1 if programs.norm is None else 2)])
        order = [self._numbers[params.units[n]] for n in reversed(layers) if params.units[n] in self._numbers]
        files.tier.begin(order + [n for n, unit in enumerate(files.units) if not unit.segment])
        running = Dispatched(self.timeline)
        ends, before = part_of(state.params, ""), files.kept_of(state.opt_state)
        micros, total = programs.split(batch)
        alone = len(micros) == 1

        # Forward: hidden states of several micro-batches wait in the host's memory, that of one stays on the device.
        hidden: list[jax.Array] = []
        tallies: list[Any] = []
        for micro in micros:
            x, tally = running.run(programs.embed, ends, micro, watched=0)
            hidden.append(x if alone else to_host(x))
            tallies.append(tally)
        waiting = 0 if alone else 2 * sum(map(local_bytes, hidden))  # hidden states, and one more of each on its way
        with _timing(timer, running):
            for number in layers:
                unit = params.units[number]
                rows, first = params.placed(number, params.tier.take(number)), np.int32(of.layer_of(unit))
                for i, micro in reversed(list(enumerate(micros))):  # in the order of writing, see ``DiskInputs``
                    given = rows, to_device(hidden[i]), tallies[i], micro, first
                    x, tallies[i], values = running.run(programs.forward[of.kind_of(unit)], *given, watched=0)
                    saved.put(number, i, [hidden[i], *values])
                    del given, values
                    hidden[i] = x if alone else to_host(x)
                params.tier.release(number, running.waiting())
                del rows
        found, grads_of = programs.head_zeros(), []
        for i, micro in enumerate(micros):
            given = ends, to_device(hidden[i]), tallies[i], micro, total, found
            found, dx = running.run(programs.head, *given, watched=1)
            del given
            grads_of.append(dx if alone else to_host(dx))
        sums, end_grads = found
        del hidden, tallies, found

        # Backward: a layer is updated when all its micro-batches have been through it. The norm that gradients are
        # clipped by is that of all layers, which a backward pass without updates finds first.
        norm, squares = None, []

        def measure(number: int, rows: Any, grads: Any) -> None:
            squares.append(running.run(programs.squared[params.units[number].segment], grads))
            params.tier.release(number, running.waiting())

        if programs.norm is not None:
            with _timing(timer, running):
                last = self._backward(micros, total, grads_of, running, measure, final=False)
            end_grads = self._with_lookups(ends, micros, last, end_grads)
            norm = programs.norm(squares, end_grads)
        norms: list[Any] = [None] * (len(layers) + 1)
        counters = before

        def update(number: int, rows: Any, grads: Any) -> None:
            nonlocal counters
            unit = params.units[number]
            state_unit = self._numbers.get(unit)
            arrays = [] if state_unit is None else files.placed(state_unit, files.tier.take(state_unit))
            given = rows, grads, before, arrays, norm
            new, arrays, counters, norms[number] = running.run(programs.update[unit.segment], *given, watched=3)
            params.give(number, new)
            if state_unit is not None:
                files.give(state_unit, arrays)

        with _timing(timer, running):
            last = self._backward(micros, total, grads_of, running, update, final=True)
        if norm is None:
            end_grads = self._with_lookups(ends, micros, last, end_grads)
        ends, counters, norms[-1] = self._update_ends(ends, end_grads, before, norm, running)

        resident = replace(state, params=(), opt_state=())
        step, extras, metrics = programs.finish(resident, counters, sums, norms)
        moved = {what: before + sum(tier.moved[what] for tier in tiers) for what, before in moved.items()}
        metrics |= {"disk_read_bytes": moved["read"], "disk_written_bytes": moved["write"]}
        if params.chunks is not None:
            metrics["disk_kept_bytes"] = moved["kept"]
        if chunks is not None and (line := chunks.end()):
            self.say(line)
        if timer is not None and isinstance(saved, DiskInputs):
            self.say(saved.choose(timer.passes, timer.clock))
        whole = {**state.params, **ends}
        return replace(state, params=whole, opt_state=files.with_kept(counters), step=step, extras=extras), metrics

    def _backward(
        self,
        micros: Any,
        total: Any,
        grads_of: list[jax.Array],
        running: Dispatched,
        use: Callable[[int, Any, Any], None],
        final: bool,
    ) -> list[jax.Array]:
        """Backward pass through the layers; the gradients of the first one's inputs, by micro-batch.

        Args:
            micros, total: of ``split``.
            grads_of: gradients of the last layer's outputs, by micro-batch.
            running: programs that run.
            use: ``(number of a layer, its parameters, its gradients)``; gives its parameters back.
            final: the saved inputs are not needed again.
        """
        programs, params = self._programs, self._of.params
        grads_of, alone = list(grads_of), len(micros) == 1
        self.inputs.begin()
        for number in reversed(range(len(params.units))):
            unit = params.units[number]
            rows, first = params.placed(number, params.tier.take(number)), np.int32(self._of.layer_of(unit))
            grads = programs.layer_zeros[unit.segment]()
            for i, micro in enumerate(micros):
                x, *values = self.inputs.take(number, i)
                given = rows, x, values, micro, to_device(grads_of[i]), total, first, grads
                grads, dx = running.run(programs.backward[self._of.kind_of(unit)], *given, watched=1)
                del given, x, values
                self.inputs.drop(number, i, running.waiting(), final)
                grads_of[i] = dx if alone else to_host(dx)
            use(number, rows, grads)
            del rows, grads
        return grads_of

    def _with_lookups(self, ends: Any, micros: Any, grads_of: list[jax.Array], grads: Any) -> Any:
        """Gradients of the ends with those of the embedding's lookups."""
        for micro, dx in zip(micros, grads_of, strict=True):
            grads = self._programs.lookup(ends, micro, to_device(dx), grads)
        return grads

    def _update_ends(self, ends: Any, grads: Any, before: Any, norm: Any, running: Dispatched) -> tuple[Any, Any, Any]:
        files = self._files
        number = next((n for n, unit in enumerate(files.units) if not unit.segment), None)
        arrays = [] if number is None else files.placed(number, files.tier.take(number))
        ends, arrays, counters, norms = running.run(self._programs.ends, ends, grads, before, arrays, norm, watched=3)
        if number is not None:
            files.give(number, arrays)
        return ends, counters, norms


def _timing(timer: PassTimer | None, running: Dispatched) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if timer is None else timer.timing(lambda: running.waiting()())
