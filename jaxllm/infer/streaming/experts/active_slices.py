"""Active slices: predictors of the slices of a ReLU layer that add something for a token (LLM in a flash).

Where ReLU is the activation most hidden units of a trained model are zero for a token, and those of the next tokens are
mostly the same. So a few slices of each layer are in memory, those that the last tokens needed, and of the others only
those are read that a predictor says are active; a slice's columns and rows lie together, so it is one read
(arXiv:2312.11514, sections 3.1 and 3.2). The predictor is linear in the layer's input, a slice is taken where it is
above 0, and its threshold is by recall: so many of the active slices of calibration tokens are taken. What is missed is
lost to the output; what is taken in vain costs time alone. The paper's predictor has two matrices of low rank.

Legend: D embed, N slices, n tokens, F hidden units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

import sharding
from jaxllm.hub.safetensors import open_file, write_file
from jaxllm.infer.streaming.layer_store import LayerStore, units_of
from jaxllm.models import DecoderConfig, Functional, Segments

HOW = "Write one with `python -m recipes.active_slices MODEL --slices N --out FILE`."
NEVER = 1e4
"""Threshold of a slice that was never active."""
SIGNED, NEAR = 16, 0.05
"""Units whose weights are in a signature, and the difference, as a share, that dtypes may make in it."""


@dataclass(frozen=True)
class ActiveSlices:
    """Predictors of a model.

    Attributes:
        layers: router [D N] and bias [N] of each dense layer, by its number in the model.
        signatures: ``signature`` of the weights of each of them that the predictors were learned with; empty: of any.
    """

    layers: dict[int, tuple[Float[np.ndarray, "D N"], Float[np.ndarray, " N"]]]
    signatures: dict[int, Float[np.ndarray, " S"]] = field(default_factory=dict)

    def weights(self, layer: int, gate: Float[np.ndarray, "D F"]) -> dict[str, np.ndarray]:
        """Weights of a layer's router, by name.

        Args:
            layer: its number.
            gate: its gate projection.

        Raises:
            ValueError: they were learned with other weights.
        """
        router, bias = self.layers[layer]
        if (known := self.signatures.get(layer)) is not None:
            own = signature(gate)
            if np.linalg.norm(own - known) > NEAR * np.linalg.norm(known):
                raise ValueError(
                    f"active slices of layer {layer} were learned with other weights than the model's. {HOW}"
                )
        return {"router": router, "router_bias": bias}

    def check(self, dense: Sequence[int], config: DecoderConfig, slices: int) -> None:
        """Checks that they are of a model.

        Args:
            dense: numbers of its dense layers.
            config: its architecture.
            slices: slices of a layer.

        Raises:
            ValueError: they are of other layers, widths or slices; says which.
        """
        if sorted(self.layers) != list(dense):
            raise ValueError(
                f"active slices are of layers {sorted(self.layers)}, and the model's are {list(dense)}. {HOW}"
            )
        for layer, (router, _) in self.layers.items():
            if router.shape != (config.embed_dim, slices) or self.layers[layer][1].shape != (slices,):
                raise ValueError(
                    f"active slices of layer {layer}: {router.shape[1]} slices of inputs of {router.shape[0]}; the "
                    f"model has inputs of {config.embed_dim}, and slices = {slices}: give slices={router.shape[1]}, or "
                    f"another file. {HOW}"
                )

    def write(self, path: Path) -> None:
        """Writes them to a safetensors file."""
        arrays = {}
        for layer, (router, bias) in self.layers.items():
            arrays |= {f"layers.{layer}.router": np.float32(router), f"layers.{layer}.router_bias": np.float32(bias)}
            if layer in self.signatures:
                arrays[f"layers.{layer}.signature"] = np.float32(self.signatures[layer])
        write_file(path, arrays)

    @classmethod
    def read(cls, path: Path) -> ActiveSlices:
        """Predictors of a file.

        Raises:
            ValueError: it is missing, damaged or not one of ``write``.
        """
        try:
            found = {name: np.asarray(array) for name, array in open_file(path).items()}
            numbers = sorted({int(name.split(".")[1]) for name in found})
            layers = {n: (found[f"layers.{n}.router"], found[f"layers.{n}.router_bias"]) for n in numbers}
            signed = {n: found[name] for n in numbers if (name := f"layers.{n}.signature") in found}
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise ValueError(f"active={path}: no predictors of active slices can be read: {error}. {HOW}") from error
        if not layers:
            raise ValueError(f"active={path} has no layers. {HOW}")
        return cls(layers, signed)


def learn(
    model: Functional,
    ends: Any,
    layers: LayerStore,
    tokens: Int[np.ndarray, "B S"],
    slices: int,
    recall: float = 0.99,
    *,
    tell: Callable[[str], None] = lambda _: None,
) -> ActiveSlices:
    """Predictors by the activity of calibration tokens; the model goes through them layer by layer.

    Args:
        model: the model.
        ends: its parameters outside of blocks.
        layers: where its layers are read from.
        tokens: calibration tokens.
        slices: N.
        recall: share of the active slices of these tokens that are taken, slice by slice.
        tell: takes a line as each layer is done.

    Raises:
        ValueError: a feed-forward layer is no gated ReLU layer, or the recall is not a share.
    """
    if not 0 < recall <= 1:
        raise ValueError(f"recall = {recall}; give a share above 0, up to 1.")
    found, signed = {}, {}
    for layer, h, gate, weight in activity(model, ends, layers, tokens):
        active = np.asarray((gate > 0).reshape(len(gate), slices, -1).any(axis=-1))
        router, bias = found[layer] = fit_predictor(h, active, recall)
        signed[layer] = signature(weight)
        taken = h @ router + bias > 0
        tell(
            f"layer {layer}: {active.mean():.1%} of the slices are active for a token, {taken.mean():.1%} are taken, "
            f"with {taken[active].mean():.1%} of the active ones"
        )
    return ActiveSlices(found, signed)


def signature(gate: Float[np.ndarray, "D F"]) -> Float[np.ndarray, " S"]:
    """A few projections of a layer's gate weights on a fixed direction, which tell weights apart in any dtype."""
    direction = np.random.default_rng(0).normal(size=len(gate))
    return (direction @ np.asarray(gate[:, :SIGNED], np.float64)).astype(np.float32)


def activity(
    model: Functional, ends: Any, layers: LayerStore, tokens: Int[np.ndarray, "B S"]
) -> Iterator[tuple[int, Float[np.ndarray, "n D"], Float[np.ndarray, "n F"], Float[np.ndarray, "D F"]]]:
    """Number, inputs, results of the gate projection for all tokens, and its weights, of each dense layer.

    Raises:
        ValueError: a dense layer has another activation than ReLU.
    """
    for number, block in enumerate(model.config.blocks):
        if block.mlp.mixture is None and (block.mlp.activation != "relu" or not block.mlp.gated):
            raise ValueError(
                f"layer {number} has the activation {block.mlp.activation!r}; slices are inactive where a gated layer "
                "has ReLU."
            )
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    device = next(iter(jax.tree.leaves(ends)[0].devices()))

    def run(s: int, b: int) -> Any:
        def step(weights: Any, x: Any, layer: Any) -> tuple[Any, Any]:
            with sharding.use_rules(model.rules):
                block = model.block(s, b, weights, layer)
                x, h, _ = block.attend(x, positions, layer, Segments())
                out, _ = block.mlp(h, layer, Segments())
                return block.add(x, out), h

        return jax.jit(step)

    steps = {(s, b): run(s, b) for s, (group, _) in enumerate(model.config.segments) for b in range(len(group))}
    with sharding.use_rules(model.rules):
        x = model.embed(ends, jnp.asarray(tokens), positions)
    for unit in units_of(model.config.segments):
        weights = layers.read(unit, device)
        for b in sorted(weights, key=int):
            number = unit.first + int(b)
            x, h = steps[unit.segment, int(b)](weights[b], x, jnp.int32(number))
            if model.config.blocks[number].mlp.mixture is None:
                rows = np.asarray(h, np.float32).reshape(-1, h.shape[-1])
                gate = np.asarray(weights[b]["mlp"]["gate"], np.float32)
                yield number, rows, rows @ gate, gate


def fit_predictor(
    h: Float[np.ndarray, "n D"], active: Bool[np.ndarray, "n N"], recall: float
) -> tuple[Float[np.ndarray, "D N"], Float[np.ndarray, " N"]]:
    """Linear predictor of active slices: least squares on +1 and -1, with thresholds by recall.

    Args:
        h: inputs.
        active: which slices are active for each.
        recall: share of a slice's active inputs that are above its threshold.

    Returns:
        router and bias: a slice is taken where ``h @ router + bias`` is above 0.
    """
    x = h.astype(np.float64)
    gram = x.T @ x
    gram += 1e-3 * np.trace(gram) / len(gram) * np.eye(len(gram))
    router = np.linalg.solve(gram, x.T @ np.where(active, 1.0, -1.0))
    scores, bias = x @ router, np.full(active.shape[1], -NEVER)
    for slice_ in range(active.shape[1]):
        own = np.sort(scores[active[:, slice_], slice_])
        if len(own):
            lowest = own[min(int((1 - recall) * len(own)), len(own) - 1)]
            bias[slice_] = -(lowest - 1e-4 * (1 + abs(lowest)))
    return router.astype(np.float32), bias.astype(np.float32)
