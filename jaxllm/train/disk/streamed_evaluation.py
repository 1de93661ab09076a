"""Evaluation of parameters that are in files: each layer is read once for a group of held-out batches."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from jaxllm.models import Functional
from jaxllm.train.disk.disk_step import part_of
from jaxllm.train.disk.layer_stream_step import Dispatched
from jaxllm.train.disk.saved_inputs import local_bytes, to_device, to_host
from jaxllm.train.disk.streamed_programs import StreamedModel
from jaxllm.train.evaluate import Evaluation, Evaluator
from jaxllm.train.step.loss import LossSums
from jaxllm.train.step.objective import CrossEntropyObjective

BATCHES = 32
"""Held-out batches that go through the layers together; their hidden states are in the host's memory."""


class StreamedEvaluator(Evaluator):
    """Evaluates parameters of which layers are in files, on a held-out text.

    Args:
        of: model, with the files of the parameters.
        model: the architecture, with the attention context of evaluation.
        mesh, dataset: see ``Evaluator``.
    """

    def __init__(self, of: StreamedModel, model: Functional, mesh: Any, dataset: Any):
        super().__init__(model, mesh, dataset)
        self._of = of

        def forward(segment: str, rows: Any, x: Any, micro: Any, first: Any) -> Any:
            own = jax.tree.map(lambda p: p[0], of.tree_of(segment, rows)["segments"][segment])
            return model.group(int(segment), own, x, micro.positions, first, model.text_context(micro.segment_ids))[0]

        def head(ends: Any, x: Any, batch: Any) -> LossSums:
            return CrossEntropyObjective().from_hidden(model, ends, x, batch)

        self._embed = jax.jit(lambda ends, batch: model.embed(ends, batch.tokens, batch.positions))
        self._forward = {s: jax.jit(functools.partial(forward, s)) for s in of.segments}
        self._head = jax.jit(head)

    def __call__(self, params: Any, progress: Callable[[Iterable], Iterable] = iter) -> Evaluation:
        """See ``Evaluator``."""
        nll = count = 0.0
        batches, ends = iter(progress(self._dataset)), part_of(params, "")
        with jax.set_mesh(self._mesh):
            while group := [self.placed(batch) for batch in itertools.islice(batches, BATCHES)]:
                for sums in self._sums_of(ends, group):
                    nll, count = nll + float(sums.nll), count + float(sums.count)
        return self.evaluation(nll, count)

    def _sums_of(self, ends: Any, batches: list[Any]) -> list[LossSums]:
        files, running = self._of.params, Dispatched()
        hidden = [to_host(self._embed(ends, batch)) for batch in batches]
        if files.chunks is not None:
            files.chunks.make_room(2 * sum(map(local_bytes, hidden)))
        files.tier.begin(range(len(files.units)))
        for number, unit in enumerate(files.units):
            rows = files.placed(number, files.tier.take(number))
            first = np.int32(self._of.layer_of(unit))
            for i, batch in enumerate(batches):
                x = running.run(self._forward[unit.segment], rows, to_device(hidden[i]), batch, first)
                hidden[i] = to_host(x)
            files.tier.release(number, running.waiting())
        return [self._head(ends, to_device(x), batch) for x, batch in zip(hidden, batches, strict=True)]
