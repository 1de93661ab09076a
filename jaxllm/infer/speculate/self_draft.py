"""Self-speculation: the served model is its own draft model, with the middle layers skipped (S3D, arXiv:2405.20314).

The first and the last layers are kept. A draft of K of L layers takes about K / L of the time of a pass, and no second
model is needed. It has a KV cache of its own for the layers that it keeps. Layers that lie apart in memory
(``layers="apart"``) are shared with the served model; stacked ones are copied, since a stack is read as a whole.

With a number of layers the model drafts as it is, one token a pass. With a trained draft
(``jaxllm.infer.speculate.trained_draft``) a pass drafts several tokens, after mask tokens.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.infer.speculate.draft_model import DraftModelProposer, ServedModel
from jaxllm.infer.speculate.trained_draft import TrainedDraft, check_draft, drafting_params, load_draft_file
from jaxllm.models import Functional, functional, has_unstacked_layers


class SelfDraftProposer(DraftModelProposer):
    """Self-speculation of an engine: a draft model made of some of the served model's layers.

    Args:
        kept: number of layers that the draft has, the first and the last ones; or a trained draft.
        served: served model.

    Raises:
        ValueError: the model has too few layers, or is not the one that the draft was trained for; or see
            ``DraftModelProposer``.
    """

    def __init__(self, kept: int | TrainedDraft, served: ServedModel):
        layers, self._trained = served.model.config.layers, kept if isinstance(kept, TrainedDraft) else None
        self._whole, self._mesh = served.model, served.mesh
        if self._trained is not None:
            self._layers = list(self._trained.layers)
            if max(self._layers) >= layers:
                raise ValueError(
                    f"speculate: the trained draft keeps layer {max(self._layers)}, but the model has {layers}; train "
                    "a draft of this model."
                )
        else:
            assert isinstance(kept, int)
            if kept >= layers:
                raise ValueError(f"speculate: self:{kept}, but the model has {layers} layers; keep 1 to {layers - 1}.")
            self._layers = first_and_last(kept, layers)
        model, params = with_layers(served.model, served.params, self._layers)
        if self._trained is not None:
            check_draft(self._trained, served.model, model)
        masks = 0 if self._trained is None else len(self._trained.masks)
        super().__init__(model, self._drafting(model, params), served, masks)

    def swap(self, params: Any) -> None:
        """Takes the kept layers of the new weights."""
        self.runner.swap(self._drafting(*with_layers(self._whole, params, self._layers)))
        self._held.clear()

    def _drafting(self, model: Functional, params: Any) -> Any:
        """Weights of the kept layers, as they draft."""
        if self._trained is None:
            return params
        if self._mesh is None or self._mesh.size == 1:
            return drafting_params(self._trained, model, params, merge=False)
        with jax.set_mesh(self._mesh):
            return drafting_params(self._trained, model, params, merge=True)


def first_and_last(kept: int, layers: int) -> list[int]:
    """Indices of the first and the last of so many layers, of which ``kept`` are kept."""
    first = -(-kept // 2)
    return [*range(first), *range(layers - kept + first, layers)]


def parse_kept(text: str) -> int | TrainedDraft:
    """Number of layers that a draft keeps, or a trained draft, from the text after ``self:``.

    Raises:
        ValueError: it is no number of 1 or more, and no file of a trained draft.
    """
    if text.endswith(".safetensors"):
        return load_draft_file(Path(text))
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(
            f"self:{text}; give the number of layers that the draft keeps, such as self:8, or a trained draft, such as "
            "self:runs/s3d_smollm2/draft.safetensors."
        )
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
    own, apart = [layer_params(model, params, layer) for layer in layers], has_unstacked_layers(params)
    segments, first = {}, 0
    for number, (_, repeats) in enumerate(smaller.segments):
        some, first = [{"0": layer} for layer in own[first : first + repeats]], first + repeats
        segments[str(number)] = tuple(some) if apart else jax.jit(_stacked)(some)
    made = replace(functional(smaller, model.rules), adapt=model.adapt)
    return made, params | {"segments": segments}


def layer_params(model: Functional, params: Any, layer: int) -> Any:
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
