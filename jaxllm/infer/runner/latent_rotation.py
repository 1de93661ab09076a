"""Latent rotation (TPLA, arXiv:2508.15881): an orthogonal rotation of MLA latents, folded into the weights.

An RMSNorm whose gain is in the weights behind it commutes with a rotation (proposition 1), so rotated latents compute
the same, while their slices (``latent_slices``) become better stand-ins for the whole. A row of ``ROTATIONS`` makes the
rotation of a layer: "hadamard" spreads large channels over all slices (section 4.3.1), "pca" takes the principal
components of the latents of a text in the order of their variances, so that the first slice has nearly all of them
(section 4.3.2), "none" is plain slicing.

The factor of a slice on its part of the scores is the paper's mu (condition 2). The paper takes it from the shares of
variance. Here it is the least-squares fit on the text: with p the attention weights of a query, the covariance under p
of a slice's scores with all of the scores, over the variance of the slice's. Softmax ignores a constant in the scores,
and to second order this minimises the Kullback-Leibler divergence of the slice's softmax from p.

Legend: L layers, B batch, S sequence, D embed, N query heads, C latent dim, R rotated dims, H = C + R, I slices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int

import sharding
from jaxllm.config import ConfigError
from jaxllm.infer.runner.serving_mesh import placements, put, serving_model, spans_processes
from jaxllm.models.attention_context import AttentionParams, LayerIndex, Segments
from jaxllm.models.channel_order import block_places, weighted_blocks
from jaxllm.models.decoder import DecoderConfig
from jaxllm.models.functional import Functional, Params, functional
from jaxllm.models.params import at_least_f32

SEED = 0
"""Seed of the signs of a Hadamard matrix."""
FOLDED = ("kv_down", "kv_up", "kv_norm", "kv_bias")
"""Weights of a layer that a rotation is folded into."""


def hadamard(moments: Float[np.ndarray, "C C"]) -> Float[np.ndarray, "C C"]:
    """Hadamard matrix of drawn signs over sqrt(C); of a C that is no power of two, its largest power of two times a
    drawn rotation of the rest.
    """
    c, rng = len(moments), np.random.default_rng(SEED)
    power = c & -c
    found = np.linalg.qr(rng.normal(size=(c // power, c // power)))[0]
    while len(found) < c:
        found = np.block([[found, found], [found, -found]]) / np.sqrt(2)
    return rng.choice([-1.0, 1.0], c)[:, None] * found


def principal_components(moments: Float[np.ndarray, "C C"]) -> Float[np.ndarray, "C C"]:
    """Principal components as columns, those of the largest variance first."""
    return np.linalg.eigh(moments)[1][:, ::-1]


ROTATIONS: dict[str, Callable[[Float[np.ndarray, "C C"]], Float[np.ndarray, "C C"]]] = {
    "hadamard": hadamard,
    "pca": principal_components,
    "none": lambda moments: np.eye(len(moments)),
}
"""Rotations by name: orthogonal matrices by the second moments of a layer's normed latents on a text."""


class LatentRotation:
    """Rotation of a model's MLA latents, which are in slices from then on.

    Args:
        model: model with MLA.
        params: its weights, stacked, those of ``FOLDED`` in plain arrays.
        slices: slices of a latent (I).
        kind: row of ``ROTATIONS``.
        tokens: Int[np.ndarray, "B S"], text that variances and factors are measured on.
        mesh: mesh to run on; None: one device.

    Attributes:
        model: the model with latents in slices.
        rotations: of each block, Float[np.ndarray, "L C C"], or None where it is no MLA.
        factors: of each block, Float[np.ndarray, "L I"], or None.

    Raises:
        ConfigError: the model has no MLA, slices do not divide it, or there are weights of another kind.
    """

    def __init__(
        self,
        model: Functional,
        params: Params,
        slices: int,
        kind: str,
        tokens: Int[np.ndarray, "B S"],
        mesh: Mesh | None = None,
    ):
        self._config, self._mesh = model.config, mesh
        self._check(model, params, slices)
        blocks = weighted_blocks(model.config, params)
        self.rotations: list[np.ndarray | None] = [None] * len(blocks)
        self.factors: list[np.ndarray | None] = [None] * len(blocks)
        for number, (block, group) in enumerate(blocks):
            if block.attention.kv_spec.latent:
                layers = group["attention"]["kv_norm"]["gain"].shape[0]
                self.rotations[number] = np.broadcast_to(
                    np.eye(block.attention.kv_spec.value_dim), (layers, *(block.attention.kv_spec.value_dim,) * 2)
                )
        moments, _ = self._statistics(model, params, slices, tokens)
        self.rotations = [
            None if one is None else np.stack([ROTATIONS[kind](layer) for layer in own])
            for one, own in zip(self.rotations, self._by_block(moments), strict=True)
        ]
        _, sums = self._statistics(model, params, slices, tokens)
        found = sums[:, 0] / np.where(sums[:, 1] > 0, sums[:, 1], 1.0)
        factors = np.where(sums[:, 1] > 0, found, 1.0)
        self.factors = [
            None if one is None else own for one, own in zip(self.rotations, self._by_block(factors), strict=True)
        ]
        self.model = _of_layers(model, slices)

    def fold(self, params: Params) -> Params:
        """The rotated weights, with the factors of slices; those of other layers are shared, not copied."""
        folded = self._rotated(params)
        for (segment, number), factors, (_, group) in zip(
            block_places(self._config), self.factors, weighted_blocks(self._config, folded), strict=True
        ):
            if factors is not None:
                attention = group["attention"]
                gain = attention["kv_norm"]["gain"]
                attention["slice_factors"] = _like(jnp.asarray(factors, gain.dtype), gain)
                folded["segments"][segment][number] = {**group, "attention": attention}
        return folded

    def _rotated(self, params: Params) -> Params:
        """The weights with gains of the latents' norms in the up-projections, and the rotation on both sides."""
        segments: dict[str, Any] = {name: dict(groups) for name, groups in params["segments"].items()}
        plus_one = self._config.norm == "rms_plus_one"
        for (segment, number), rotation, (block, group) in zip(
            block_places(self._config), self.rotations, weighted_blocks(self._config, params), strict=True
        ):
            if rotation is None:
                continue
            attention, latent = dict(group["attention"]), block.attention.kv_spec.value_dim
            gain = attention["kv_norm"]["gain"]
            attention["kv_norm"] = {"gain": jnp.zeros_like(gain) if plus_one else jnp.ones_like(gain)}
            gains = np.asarray(gain, np.float64) + plus_one
            attention["kv_down"] = _times(attention["kv_down"], rotation, "ldc,lce->lde", latent)
            up = rotation.swapaxes(1, 2) * gains[:, None]
            attention["kv_up"] = _times(attention["kv_up"], up, "lcnh,lec->lenh", None)
            if "kv_bias" in attention:
                attention["kv_bias"] = _times(attention["kv_bias"], rotation, "lc,lce->le", latent)
            segments[segment][number] = {**group, "attention": attention}
        return {**params, "segments": segments}

    def _statistics(
        self, model: Functional, params: Params, slices: int, tokens: Int[np.ndarray, "B S"]
    ) -> tuple[Float[np.ndarray, "L C C"], Float[np.ndarray, "L 2 I"]]:
        """Second moments of the latents that are rotated so far, and what the factors of their slices are made of."""
        made, params = serving_model(model), self._rotated(params)
        with sharding.use_mesh(self._mesh), sharding.use_rules(made.rules):
            if self._mesh is not None:
                params = jax.tree.map(put, params, placements(made, params, self._mesh))
            tokens = np.tile(tokens, (sharding.axis_size("batch"), 1))
            places = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
            dtype, layers = at_least_f32(jnp.dtype(self._config.dtype)), self._config.layers
            latent = max(b.attention.kv_spec.value_dim for b in self._config.blocks if b.attention.kv_spec.latent)
            empty = jnp.zeros((layers, latent, latent), dtype), jnp.zeros((layers, 2, slices), dtype)

            def run(params: Params, tokens: Array, places: Array) -> tuple[Array, Array]:
                tokens, places = (sharding.constrain(x, "batch", "seq") for x in (tokens, places))
                _, ctx = made.forward(params, tokens, places, LatentStatistics(*empty))  # pyright: ignore[reportArgumentType]
                return ctx.moments, ctx.sums  # pyright: ignore[reportAttributeAccessIssue]

            moments, sums = jax.jit(run)(params, jnp.asarray(tokens, jnp.int32), places)
        return np.asarray(moments, np.float64), np.asarray(sums, np.float64)

    def _by_block(self, x: np.ndarray) -> list[np.ndarray]:
        """Rows of layers as rows of the blocks that they are repeats of."""
        found, first = [], 0
        for group, repeats in self._config.segments:
            layers = first + np.arange(len(group) * repeats).reshape(repeats, len(group))
            first += layers.size
            found += [x[own] for own in layers.T]
        return found

    def _check(self, model: Functional, params: Params, slices: int) -> None:
        check_sliceable(model.config, slices)
        apart = any(isinstance(segment, tuple) for segment in params["segments"].values())
        blocks = [] if apart else weighted_blocks(model.config, params)
        arrays = [
            group["attention"][name]
            for block, group in blocks
            if block.attention.kv_spec.latent
            for name in ("kv_down", "kv_up")
        ]
        wrong = {
            "layers apart": apart,
            "adapted or packed weights (packed ones are unpacked with --weights plain)": model.adapt is not None
            or not all(hasattr(x, "at") for x in arrays),
            "devices of several processes": spans_processes(self._mesh),
        }
        _refuse(wrong)


def check_sliceable(config: DecoderConfig, slices: int) -> None:
    """Checks that a model's MLA latents can be rotated and cut into slices.

    Raises:
        ConfigError: names what is in the way.
    """
    latent = {b.attention.kv_spec.value_dim for b in config.blocks if b.attention.kv_spec.latent}
    if not latent:
        raise ConfigError("engine: mla = 'tpla' slices MLA latents, and the model has none; leave it out.")
    wrong = {
        f"latents of {sorted(latent)}, which tensor={slices} does not divide": any(c % slices for c in latent),
        "latents of different sizes": len(latent) > 1,
        "LayerNorms, which a rotation does not go through": config.norm == "layer",
        "latents in slices already": any(b.attention.kv_spec.slices > 1 for b in config.blocks),
    }
    _refuse(wrong)


def _refuse(wrong: dict[str, bool]) -> None:
    for what in (what for what, is_so in wrong.items() if is_so):
        raise ConfigError(f"engine: mla = 'tpla' folds a rotation into weights, and there are {what}; leave it out.")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatentStatistics:
    """Attention context that looks at MLA latents while a model reads a text, each row one document.

    Attributes:
        moments: Float[Array, "L C C"], second moments of the latents.
        sums: Float[Array, "L 2 I"], covariance of each slice's scores with all scores under the attention weights, and
            variance of the slice's, over all queries.
    """

    moments: Any
    sums: Any
    is_kv_cache: ClassVar[bool] = True

    def attend(
        self,
        layer: LayerIndex,
        q: Float[Array, "B S N H"],
        k: Float[Array, "B S K H"],
        v: Float[Array, "B S K V"] | None,
        positions: Int[Array, "B S"],
        params: AttentionParams,
        sinks: Float[Array, " N"] | None = None,
    ) -> tuple[Float[Array, "B S N V"], LatentStatistics]:
        """Attention output of whole documents; the context with the layer's sums."""
        if v is not None:
            return Segments().attend(layer, q, k, v, positions, params, sinks)[0], self
        (b, s, _, _), latent, slices = q.shape, params.latent, self.sums.shape[2]
        assert latent is not None
        # A short text: every device computes all of it.
        q, k = (sharding.constrain(x, *(None,) * 4).astype(self.moments.dtype) for x in (q, k))
        k = k[:, :, 0]
        keys = k[..., :latent].reshape(b, s, slices, -1)
        parts = params.scale * jnp.einsum("btnic,bsic->ibnts", q[..., :latent].reshape(*q.shape[:3], slices, -1), keys)
        turned = params.scale * jnp.einsum("btnr,bsr->bnts", q[..., latent:], k[..., latent:])
        seen = jnp.arange(s)[:, None] >= jnp.arange(s)
        weights = jax.nn.softmax(jnp.where(seen, jnp.sum(parts, axis=0) + turned, -jnp.inf), axis=-1)
        centred = parts - jnp.sum(weights * parts, axis=-1, keepdims=True)
        whole = jnp.sum(centred, axis=0)
        sums = jnp.stack([jnp.sum(weights * centred * other, axis=(1, 2, 3, 4)) for other in (whole, centred)])
        moments = jnp.einsum("bsc,bsd->cd", k[..., :latent], k[..., :latent])
        out = jnp.einsum("bnts,bsc->btnc", weights, k[..., :latent])
        found = LatentStatistics(self.moments.at[layer].set(moments), self.sums.at[layer].set(sums))
        return out.astype(q.dtype), found


def with_slices(config: DecoderConfig, slices: int) -> DecoderConfig:
    """Configuration of a model whose MLA latents are in slices."""

    def of_block(block: Any) -> Any:
        if not block.attention.kv_spec.latent:
            return block
        return dataclasses.replace(block, attention=dataclasses.replace(block.attention, slices=slices))

    pattern, prefix = (tuple(map(of_block, blocks)) for blocks in (config.pattern, config.prefix))
    return dataclasses.replace(config, pattern=pattern, prefix=prefix)


def _of_layers(model: Functional, slices: int) -> Functional:
    """The model with MLA latents in slices."""
    found = functional(with_slices(model.config, slices), model.rules)
    return dataclasses.replace(found, training_context=model.training_context, text_context=model.text_context)


def _times(weight: Any, matrix: np.ndarray, equation: str, columns: int | None) -> Any:
    """Weights times a matrix for each layer, in at least float32; of the last dim, the first ``columns`` alone."""
    there = getattr(weight, "sharding", None)
    if isinstance(there, NamedSharding):
        # The dim that is summed over is whole on each device; weights that are stored in shards go back to them.
        summed = 1 if columns is None else weight.ndim - 1
        spec = [
            None if i == summed else name for i, name in enumerate([*there.spec, *[None] * weight.ndim][: weight.ndim])
        ]
        weight = jax.device_put(weight, NamedSharding(there.mesh, jax.P(*spec)))
    dtype = at_least_f32(weight.dtype)
    rotate = _like(jnp.asarray(matrix, dtype), weight)
    part = (weight if columns is None else weight[..., :columns]).astype(dtype)
    found = jnp.einsum(equation, part, rotate).astype(weight.dtype)
    if columns is not None:
        found = jnp.concatenate([found, weight[..., columns:]], axis=-1)
    return found if there is None else jax.device_put(found, there)


def _like(x: Array, other: Any) -> Array:
    """The array on all devices of another one."""
    there = getattr(other, "sharding", None)
    if there is None:
        return x
    return jax.device_put(x, NamedSharding(there.mesh, jax.P()) if isinstance(there, NamedSharding) else there)
