"""GPTQ beside rounding to the nearest, on activations that it has not seen: every matrix of SmolLM2."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.serving.quantised_losses import texts
from jaxllm.convert.load import load_model
from jaxllm.quant.grids import IntGrid
from jaxllm.quant.input_statistics import BlockRecorder, InputStatistics, leaf_path
from jaxllm.quant.methods.nearest import round_to_nearest, spread
from jaxllm.quant.methods.rounding_table import METHODS
from tests.proofs.harness import proof

ROWS, HELD_OUT, LENGTH, GROUP = 12, 6, 256, 64
LAYERS = 30


class SmolLM2Inputs:
    """Statistics of the inputs of the float model's matmuls: of calibration rows, and of held-out ones.

    Layers are run one after another, and the hidden states of the last one are kept.
    """

    def __init__(self) -> None:
        loaded = load_model("smollm2")
        self.model, self.params = loaded.model, jax.tree.map(np.asarray, loaded.params)
        held_out, calibration = texts()
        rows = [
            np.asarray(list(loaded.tokenizer.encode(text[: 40 * count * LENGTH]))[: count * LENGTH], np.int32)
            for part, count in ((calibration, ROWS // 3), (list(held_out.values())[:3], HELD_OUT // 3))
            for text in part
        ]
        self.recorder, self.layer = BlockRecorder(self.model), 0
        self.hidden = self.recorder.embed(self.params, np.concatenate(rows).reshape(-1, LENGTH))

    def of_layer(self, layer: int) -> list[tuple[str, Any, InputStatistics, InputStatistics]]:
        """(path, matrix [I, O], calibration's statistics, held-out statistics) of a layer's matrices."""
        if layer < self.layer:
            inputs.cache_clear()
            return inputs().of_layer(layer)
        while True:
            own = jax.tree.map(lambda x: jnp.asarray(x[self.layer], jnp.float32), self.params["segments"]["0"])
            here = self.layer == layer
            if here:
                parts = (self.hidden[:ROWS], self.hidden[ROWS:])
                seen, held = (self.recorder.run(0, own, x, layer, record=True)[1] for x in parts)
                flat = {leaf_path(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(own)}
                return [(p, flat[p].reshape(len(seen[p].most), -1), seen[p], held[p]) for p in seen]
            self.hidden, _ = self.recorder.run(0, own, self.hidden, self.layer, record=False)
            self.layer += 1


@functools.cache
def inputs() -> SmolLM2Inputs:
    """The model, its layers run as far as they were asked for."""
    return SmolLM2Inputs()


def held_out_ratio(matrix: Any, seen: InputStatistics, held: InputStatistics, grid: IntGrid, group: int) -> float:
    """Squared error of the results on held-out inputs with GPTQ's codes, over that of the nearest ones."""

    def error(codes: Any, params: Any) -> float:
        off = matrix - grid.decode(codes, spread(params, group, len(matrix)))
        return float(jnp.sum(off * (held.gram @ off)))

    codes, params, _ = METHODS["gptq"].round(matrix, seen.gram, grid, group)
    return error(codes, params) / error(*round_to_nearest(matrix, grid, group))


@proof("quant", cases=range(LAYERS), quick=[0], sample=1, bound={"worst": 1.0, "all": 0.9})
def gptq_is_no_worse_on_held_out_activations(layer: int) -> dict[str, float]:
    """Error of the results over that of rounding to the nearest: the worst of a layer's seven matrices, and the mean.

    int4 in groups of 64. Calibration: 12 rows of 256 tokens of plays, code and reference text. Held out: 6 rows of
    other plays, other code and other reference text.
    """
    found = {
        path: held_out_ratio(matrix, seen, held, IntGrid(4), GROUP)
        for path, matrix, seen, held in inputs().of_layer(layer)
    }
    assert len(found) == 7
    return {"worst": max(found.values()), "all": sum(found.values()) / len(found)}
