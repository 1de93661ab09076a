"""Packed rows through a model: no attention across documents, no gradient of masked targets, full rows."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.data import Batch
from jaxllm.data.sequence_packing import pack_concat, pack_documents
from jaxllm.models import Segments, functional
from jaxllm.train.step.loss import loss_sums
from sharding import MeshSpec
from tests import environment, quick, tiny
from tests.proofs.harness import proof

ROWS, SEQ_LEN, VOCAB = 3, 24, 64
CONFIG = tiny.decoder(layers=2, vocab_size=VOCAB, tied=False)


def packed(seed: int) -> Batch:
    """The first rows of random documents, some of whose tokens are targets, by one of the packings."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, 20, 12)
    tokens = rng.integers(0, VOCAB, int(lengths.sum())).astype(np.uint16)
    trained = (rng.random(len(tokens)) < 0.6).astype(np.uint8)
    starts = np.cumsum(lengths) - lengths
    plan = (pack_concat, pack_documents)[seed % 2](starts, lengths, SEQ_LEN)
    return plan.gather(tokens, np.arange(ROWS), trained)


@functools.cache
def programs() -> tuple[Any, Any, Any]:
    """(parameters, gradients of the loss, how far each place's logits depend on each place's embedding)."""
    model, params = functional(CONFIG), quick.params(CONFIG)
    mesh = MeshSpec.parse("dp").build(jax.devices()[:1])

    def gradients(batch: Batch) -> Any:
        return jax.grad(lambda p: loss_sums(model, p, batch).nll)(params)

    def influence(batch: Batch, row: Any, place: Any) -> Any:
        """d (a random function of the logits at one place) / d (embedding of the vocabulary)."""

        def logits_at(p: Any) -> Any:
            hidden, _ = model.forward(p, batch.tokens, batch.positions, Segments(batch.segment_ids))
            return (model.head(p, hidden)[row, place] * jnp.cos(jnp.arange(VOCAB))).sum()

        return jax.grad(logits_at)(params)["embedding"]["table"]

    with jax.set_mesh(mesh):
        return params, jax.jit(gradients), jax.jit(influence)


def numbered(batch: Batch) -> Batch:
    """The batch with tokens such that no two places of a row have the same one."""
    return batch._replace(tokens=np.broadcast_to(np.arange(SEQ_LEN, dtype=np.int32), batch.tokens.shape).copy())


@proof("data", count=40, sample=2, float64=True)
def packed_rows_through_a_model(seed: int) -> None:
    """Positions restart; a place's logits have gradients of exactly zero for all tokens of other documents and of later
    places, and not for those before it in its own; masked targets give gradients of exactly zero, and those of the rows
    add up to the batch's."""
    batch = packed(seed)
    rng = np.random.default_rng(seed)
    for segments, positions in zip(batch.segment_ids, batch.positions, strict=True):
        for segment in range(1, segments.max() + 1):
            there = np.flatnonzero(segments == segment)
            assert positions[there].tolist() == list(range(len(there)))
    _, gradients, influence = programs()
    mesh = MeshSpec.parse("dp").build(jax.devices()[:1])
    with jax.set_mesh(mesh):
        free = numbered(batch)
        for _ in range(4):
            row = int(rng.integers(ROWS))
            place = int(rng.choice(np.flatnonzero(batch.segment_ids[row])))
            depends = np.abs(np.asarray(influence(free, row, place)))[:SEQ_LEN].max(axis=1)
            own = (batch.segment_ids[row] == batch.segment_ids[row, place]) & (np.arange(SEQ_LEN) <= place)
            assert (depends[~own] == 0.0).all(), "a token of another document, or a later one, is seen"
            assert (depends[own] > 0.0).all(), "a token of the same document is not seen"

        plain = jax.tree.map(np.asarray, gradients(batch))
        masked = batch._replace(targets=np.full_like(batch.targets, -1))
        assert all((np.asarray(leaf) == 0.0).all() for leaf in jax.tree.leaves(gradients(masked)))
        parts = [
            batch._replace(targets=np.where(np.arange(ROWS)[:, None] == r, batch.targets, -1)) for r in range(ROWS)
        ]
        summed = jax.tree.map(lambda *leaves: sum(map(np.asarray, leaves)), *map(gradients, parts))
        assert tiny.leaf_error(summed, plain) < 1e-10


@proof("data", count=1, sample=1, bound={"padding_4096": 0.03, "padding_2048": 0.03})
def packing_efficiency(seed: int) -> dict[str, float]:
    """Rows of 4,096 are 97% full or more with the lengths of 11,135 real chats; only longer ones are split."""
    total = np.load(environment.ROOT / "tests" / "data" / "chat_lengths.npy").astype(np.int64)
    assert len(total) == 11_135
    order = np.random.default_rng(seed).permutation(len(total))  # how full rows are does not depend on it
    found = {}
    for seq_len in (4096, 2048):
        lengths = np.minimum(total[order], seq_len) + 1
        plan = pack_documents(np.cumsum(lengths) - lengths, lengths, seq_len)
        assert plan.pairs == (lengths - 1).sum()
        assert len(plan.piece_start) == (lengths > 1).sum()
        found[f"padding_{seq_len}"] = plan.padding
    return found
