"""Self-speculation: the served model is its own draft model, with the middle layers skipped (S3D, arXiv:2405.20314).

The first and the last layers are kept. A draft of K of L layers takes about K / L of the time of a pass, and no second
model is needed. It has a KV cache of its own for the layers that it keeps. Layers that lie apart in memory
(``layers="apart"``) are shared with the served model; stacked ones are copied, since a stack is read as a whole. S3D's
mask tokens, which draft several tokens in one pass, and its training are not here: the model drafts as it is, one token
a pass.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.infer.speculate.draft_model import DraftModelProposer, ServedModel
from jaxllm.models import Functional, functional, has_unstacked_layers


class SelfDraftProposer(DraftModelProposer):
    """Self-speculation of an engine: a draft model made of the served model's first and last layers.

    Args:
        kept: layers that the draft has.
        served: served model.

    Raises:
        ValueError: the model has too few layers; or see ``DraftModelProposer``.
    """

    def __init__(self, kept: int, served: ServedModel):
        layers = served.model.config.layers
        if kept >= layers:
            raise ValueError(f"speculate: self:{kept}, but the model has {layers} layers; keep 1 to {layers - 1}.")
        first = -(-kept // 2)
        self._layers, self._whole = [*range(first), *range(layers - kept + first, layers)], served.model
        super().__init__(*with_layers(served.model, served.params, self._layers), served)

    def swap(self, params: Any) -> None:
        """Takes the kept layers of the new weights."""
        self.runner.swap(with_layers(self._whole, params, self._layers)[1])
        self._held.clear()


def parse_kept(text: str) -> int:
    """Number of layers that a draft keeps, from the text after ``self:``.

    Raises:
        ValueError: it is no number of 1 or more.
    """
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"self:{text}; give the number of layers that the draft keeps, such as self:8.")
    return int(text)


def with_layers(model: Functional, params: Any, layers: list[int]) -> tuple[Functional, Any]:
    """Model of some of a model's layers, in their order, and its weights; embedding and head are shared.

    Args:
        model, params: whole model.
        layers: indices of its layers.
    """
    config = model.config
    blocks = [config.blocks[layer] for layer in layers]
    alike = all(block == blocks[0] for block in blocks)
    smaller = replace(
        config, layers=len(layers), prefix=() if alike else tuple(blocks[:-1]), pattern=(blocks[-1],), remat="none"
    )
    own, apart = [_layer(model, params, layer) for layer in layers], has_unstacked_layers(params)
    segments, first = {}, 0
    for number, (_, repeats) in enumerate(smaller.segments):
        some, first = [{"0": layer} for layer in own[first : first + repeats]], first + repeats
        segments[str(number)] = tuple(some) if apart else jax.jit(_stacked)(some)
    made = replace(functional(smaller, model.rules), adapt=model.adapt)
    return made, params | {"segments": segments}


def _layer(model: Functional, params: Any, layer: int) -> Any:
    """Weights of one layer."""
    for number, (group, repeats) in enumerate(model.config.segments):
        if layer < len(group) * repeats:
            repeat, block = divmod(layer, len(group))
            held = params["segments"][str(number)]
            if isinstance(held, tuple):
                return held[repeat][str(block)]
            return jax.tree.map(operator.itemgetter(repeat), held[str(block)])
        layer -= len(group) * repeats
    raise AssertionError(f"there is no layer {layer}")


def _stacked(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
