"""Training of self-speculation: some layers of a frozen model learn to draft several tokens in a pass (S3D).

A row is text followed by mask tokens, which branch off it: after each of some places, its anchors, the mask tokens of
a pass of the draft, which see the text up to the anchor and each other (``VisibleTokens``). So a row trains many passes
at once, each as it is when drafting. The label of a place is the distribution of the whole model there, read from the
text itself; the loss is the Kullback-Leibler divergence from it. The paper (arXiv:2405.20314, section 3) replaces some
tokens of the text by masks and learns the text's own tokens: later tokens of a row then see masks, and what the draft
has to guess is what the model would write, not what somebody wrote.

Legend: B batch, S sequence, A anchors of a row, M mask tokens of a pass, K = M + 1 tokens that a pass drafts, D embed,
V vocab.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int

from jaxllm.convert.load import LoadedModel
from jaxllm.data import Batch
from jaxllm.infer.speculate.self_draft import first_and_last, with_layers
from jaxllm.infer.speculate.trained_draft import TrainedDraft, drafting_params, save_draft
from jaxllm.models import Functional, Segments
from jaxllm.peft import AdapterConfig
from jaxllm.peft.adapted_model import adapted_model, adapter_of, start_params
from jaxllm.peft.low_rank_factors import LowRank
from jaxllm.posttrain.frozen.frozen_model import FrozenModelConfig, Parts, Step, train_parts
from jaxllm.posttrain.frozen.visible_tokens import VisibleTokens
from jaxllm.train import TrainResult

DRAFT_FILE = "draft.safetensors"
"""Name of the file of a trained draft in the directory of a run."""


@dataclass(frozen=True)
class DraftRunConfig(FrozenModelConfig):
    """Configuration of a run that trains self-speculation of a frozen model (S3D, arXiv:2405.20314).

    The model is ``init_from``; ``adapter`` are the low-rank factors of the layers that the draft keeps.

    Attributes:
        layers: layers that the draft keeps, the first and the last ones.
        tokens: tokens that a pass drafts.
        anchors: passes of the draft in a row of training.
    """

    layers: int = 15
    tokens: int = 4
    anchors: int = 32

    what: ClassVar[str] = "self-speculation's drafts"
    loop: ClassVar[str] = "jaxllm.posttrain.frozen.draft_training:train_draft"
    also_reads: ClassVar[tuple[str, ...]] = ("adapter",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adapter.kind not in ("lora", "rslora"):
            raise ValueError(f'adapter.kind = "{self.adapter.kind}": a draft learns by factors; give lora or rslora.')
        if not 1 <= self.layers < self.model.layers:
            raise ValueError(
                f"layers = {self.layers}, but the model has {self.model.layers}; give 1 to {self.model.layers - 1}."
            )
        if self.tokens < 1 or not 1 <= self.anchors <= self.data.seq_len:
            raise ValueError(
                f"tokens = {self.tokens}, anchors = {self.anchors}; give 1 or more, and 1 to {self.data.seq_len}, the "
                "tokens of a row."
            )


def train_draft(config: DraftRunConfig) -> TrainResult:
    """Trains self-speculation, and writes it to ``draft.safetensors`` in the run's directory.

    Raises:
        DataError, ValueError: settings, data or model cannot be used; the message says why.
    """
    layers = first_and_last(config.layers, config.model.layers)

    def parts(loaded: LoadedModel) -> Parts:
        start = loaded.model, loaded.params, loaded.mesh
        draft, axes = new_draft(*start, layers, config.adapter, config.tokens - 1, config.seed)
        factors = {path: {"a": one.a, "b": one.b} for path, one in draft.factors.items()}
        values = {"masks": draft.masks, "factors": factors}
        scales = {path: one.scale for path, one in draft.factors.items()}

        def made(values: Any) -> TrainedDraft:
            factors = {path: LowRank(one["a"], one["b"], scales[path]) for path, one in values["factors"].items()}
            return TrainedDraft(tuple(layers), values["masks"], factors)

        def step(rule: optax.GradientTransformation) -> Step:
            return draft_step(loaded.model, made, rule, config.anchors, config.seed)

        def write(values: Any, directory: Path) -> str:
            save_draft(made(values), directory / DRAFT_FILE)
            return f"{directory / DRAFT_FILE}: serve with --speculate self:{directory / DRAFT_FILE}"

        return Parts(values, axes, step, write)

    return train_parts(config, parts)


def new_draft(
    model: Functional, params: Any, mesh: Mesh, layers: list[int], adapter: AdapterConfig, masks: int, seed: int
) -> tuple[TrainedDraft, Any]:
    """An untrained draft, which drafts as the kept layers do, and the logical axes of its values.

    Mask tokens begin as the mean embedding, with a little noise that tells them apart.

    Args:
        model, params, mesh: model that it drafts for, its weights and their mesh.
        layers: indices of the layers that it keeps.
        adapter: its low-rank factors.
        masks: M.
        seed: of the factors and the mask tokens.
    """
    smaller, kept = with_layers(model, params, layers)
    adapted = adapted_model(smaller, adapter)
    found = adapter_of(adapter, start_params(adapted, adapter, kept, mesh, seed))
    table = np.asarray(params["embedding"]["table"], np.float32)
    noise = np.random.default_rng(seed).normal(size=(masks, table.shape[1]))
    factors = {path: jax.tree.map(jnp.asarray, one) for path, one in found.factors.items()}
    draft = TrainedDraft(tuple(layers), jnp.asarray(table.mean(0) + 0.1 * table.std() * noise, jnp.float32), factors)
    axes = {
        path: {name: ("layers",) + (None,) * (x.ndim - 1) for name, x in (("a", one.a), ("b", one.b))}
        for path, one in factors.items()
    }
    return draft, {"masks": (None, "embed"), "factors": axes}


def draft_step(model: Functional, made: Any, rule: optax.GradientTransformation, anchors: int, seed: int) -> Step:
    """Training step of a draft of a frozen model.

    Its metrics are the loss, and the share of drafted tokens that are the model's likeliest, after as many right ones
    before them as a pass has places: the expected number of accepted tokens of a greedy draft.

    Args:
        model: the frozen model.
        made: ``values -> TrainedDraft``.
        rule: updates the values.
        anchors: A.
        seed: of the anchors.
    """

    def loss_of(values: Any, weights: Any, batch: Any, at: Int[Array, "B A"]) -> tuple[Array, Array]:
        draft = made(values)
        smaller, params = with_layers(model, weights, list(draft.layers))
        params = drafting_params(draft, smaller, params, merge=False)
        row = branched_row(batch, at, draft.tokens - 1, model.config.vocab_size)
        hidden, _ = smaller.forward(params, row.tokens, row.positions, VisibleTokens(row.visible))
        logits = smaller.head(params, jnp.take_along_axis(hidden, row.places[..., None], axis=1))
        whole, _ = model.forward(weights, batch.tokens, batch.positions, Segments(batch.segment_ids))
        wanted = model.head(weights, jnp.take_along_axis(whole, row.labels[..., None], axis=1))
        found, wanted = (jax.nn.log_softmax(one.astype(jnp.float32)) for one in (logits, wanted))
        divergence = jnp.sum(jnp.exp(wanted) * (wanted - found), axis=-1)
        right = (jnp.argmax(found, -1) == jnp.argmax(wanted, -1)) & row.known
        accepted = jnp.sum(jnp.cumprod(right.reshape(*at.shape, -1), axis=-1)) / at.size
        return jnp.sum(jnp.where(row.known, divergence, 0.0)) / jnp.maximum(1, jnp.sum(row.known)), accepted

    def step(values: Any, state: Any, weights: Any, batch: Batch) -> tuple[Any, Any, dict[str, Array]]:
        # The rows themselves draw the anchors, so that a step needs no number.
        key = jax.random.fold_in(jax.random.key(seed), jnp.sum(batch.tokens, dtype=jnp.uint32))
        rows = batch.tokens.shape[0]
        order = jax.vmap(lambda one: jax.random.permutation(one, batch.tokens.shape[1]))(jax.random.split(key, rows))
        (loss, accepted), grads = jax.value_and_grad(loss_of, has_aux=True)(
            values, weights, batch, order[:, :anchors].astype(jnp.int32)
        )
        updates, state = rule.update(grads, state, values)
        return optax.apply_updates(values, updates), state, {"loss": loss, "accepted": accepted}

    return step


@dataclass(frozen=True)
class BranchedRow:
    """Rows of text with the mask tokens of passes after them.

    Attributes:
        tokens, positions: Int[Array, "B S+AM"].
        visible: Bool[Array, "B S+AM S+AM"], see ``VisibleTokens``.
        places: Int[Array, "B AK"], where the draft's tokens are read, pass by pass: the anchor and its mask tokens.
        labels: Int[Array, "B AK"], where the whole model has the distribution of each.
        known: Bool[Array, "B AK"], whether the document goes on up to there.
    """

    tokens: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    visible: Bool[Array, "B T T"]
    places: Int[Array, "B P"]
    labels: Int[Array, "B P"]
    known: Bool[Array, "B P"]


def branched_row(batch: Batch, at: Int[Array, "B A"], masks: int, first: int) -> BranchedRow:
    """Rows of text with mask tokens after them, see ``BranchedRow``.

    Args:
        batch: packed rows.
        at: anchors.
        masks: M.
        first: id of the first mask token.
    """
    (b, s), a = batch.tokens.shape, at.shape[1]
    own = jnp.arange(1, masks + 1)
    anchor = jnp.repeat(at, masks, axis=1)  # of each mask token
    number = jnp.tile(own, a)
    segment_of = jnp.take_along_axis(jnp.asarray(batch.segment_ids), at, axis=1)
    positions = jnp.take_along_axis(jnp.asarray(batch.positions), anchor, axis=1) + number
    # A query is (its place in the text or its anchor's, its pass or 0 for text, its number in the pass).
    index = jnp.concatenate([jnp.broadcast_to(jnp.arange(s), (b, s)), anchor], axis=1)
    branch = jnp.broadcast_to(
        jnp.concatenate([jnp.zeros(s, int), jnp.repeat(jnp.arange(1, a + 1), masks)]), index.shape
    )
    turn = jnp.broadcast_to(jnp.concatenate([jnp.zeros(s, int), number]), index.shape)
    segment = jnp.concatenate([batch.segment_ids, jnp.repeat(segment_of, masks, axis=1)], axis=1)
    of_text = (branch[:, None] == 0) & (index[:, None] <= index[:, :, None])
    of_pass = (branch[:, None] == branch[:, :, None]) & (branch[:, None] > 0) & (turn[:, None] <= turn[:, :, None])
    visible = (of_text | of_pass) & (segment[:, None] == segment[:, :, None])
    places = jnp.concatenate([at[:, :, None], s + jnp.arange(a * masks).reshape(1, a, masks).repeat(b, 0)], axis=-1)
    labels = at[:, :, None] + jnp.arange(masks + 1)
    there = jnp.minimum(labels, s - 1).reshape(b, -1)
    alike = jnp.take_along_axis(jnp.asarray(batch.segment_ids), there, axis=1) == jnp.repeat(
        segment_of, masks + 1, axis=1
    )
    known = alike & (labels.reshape(b, -1) < s) & (jnp.repeat(segment_of, masks + 1, axis=1) > 0)
    return BranchedRow(
        jnp.concatenate([batch.tokens, jnp.broadcast_to(first + number - 1, anchor.shape)], axis=1),
        jnp.concatenate([batch.positions, positions], axis=1),
        visible, places.reshape(b, -1), there, known,
    )  # fmt: skip
