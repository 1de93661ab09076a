"""Fixed global batch that peers fill who come and go, as in DeDLOC (arXiv:2106.10207).

The devices along the mesh axis ``data`` are peers. In a round, one step of the run, each peer that is there adds the
gradients of its rows, and the number of its targets, to sums that last over rounds. Once the rows of the sums are a
global batch, the optimizer takes one step with their mean, and the next batch begins. Parameters do not depend on who
was there, only on the rows that were added: they are those of synchronous SGD on these batches. The optimizer's
schedules count its steps, not rounds.

Here absences are drawn by the run's key, ``away`` of the peers for ``steps`` rounds at a time, and the rows of an
absent peer are left out of the run. The paper's peers are machines on the internet that average by roles, which
``averaging_roles`` plans from their bandwidths.

Legend: R peers, B rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

import sharding
from jaxllm.models.params import at_least_f32
from jaxllm.train.step.absent_experts import drawn_present
from jaxllm.train.step.step_chain import Gradients, InnerStep, StepLink, StepResult, link_state
from jaxllm.train.step.train_state import TrainState

AXIS = "data"
"""Mesh axis of the peers."""
NAME = "peers"
"""Name of the link's state in ``TrainState.extras``, and of its leaves in checkpoints."""
TAG = 0x7065
"""Folded into the run's key, so that absences are drawn apart from all else."""


@dataclass(frozen=True)
class PeersConfig:
    """Peers along the mesh axis ``data`` that fill a fixed global batch.

    Attributes:
        batch: rows of the global batch, after which the optimizer takes a step; 0: every step, with all peers.
        away: share of the peers that are away at a time, below 1.
        steps: rounds of an absence; then others are away.
    """

    batch: int = 0
    away: float = 0.0
    steps: int = 1

    def __post_init__(self) -> None:
        if self.batch < 0:
            raise ValueError(f"peers: batch = {self.batch}; give rows of a global batch, or 0 for a step every round.")
        if not 0 <= self.away < 1:
            raise ValueError(f"peers: away = {self.away}; give 0 (none) or a share of the peers below 1.")
        if self.steps < 1:
            raise ValueError(f"peers: steps = {self.steps}; give 1 or more rounds.")
        if self.away and not self.batch:
            raise ValueError(f"peers: away = {self.away} without a global batch to fill; give peers.batch too.")

    def present(self, key: Array, step: Int[Array, ""], peers: int) -> Bool[Array, " R"]:
        """Peers that are there in a round.

        Args:
            key: of the run.
            step: rounds done.
            peers: R.
        """
        away = min(round(self.away * peers), peers - 1)
        return drawn_present(jax.random.fold_in(key, TAG), step // self.steps, peers, away)


def fixed_batch(config: PeersConfig) -> StepLink | None:
    """Link that fills a fixed global batch; None without one.

    Metrics: ``peers_present``, and ``batch_filled``, 1 in rounds that end with a step of the optimizer; in others the
    step is skipped.

    Args:
        config: the batch and the peers.
    """
    if not config.batch:
        return None

    def init(params: Any) -> dict[str, Any]:
        zero = jnp.zeros((), jnp.int32)
        sums = jax.tree.map(lambda p: jnp.zeros_like(p, at_least_f32(p.dtype)), params)
        return {"sums": sums, "count": jnp.zeros((), jnp.result_type(float)), "rows": zero}

    def gradients(take: Gradients) -> Gradients:
        def run(state: TrainState, batch: Any) -> tuple[Any, ...]:
            kept, peers = link_state(state, NAME), jax.sharding.get_abstract_mesh().shape.get(AXIS, 1)
            present, rows = config.present(state.rng, state.step, peers), batch.targets.shape[0]
            sums, grads = take(state, only_rows_of(present, batch))
            total = jax.tree.map(lambda s, g: s + g.astype(s.dtype) * sums.total.astype(s.dtype), kept["sums"], grads)
            count = kept["count"] + sums.total.astype(kept["count"].dtype)
            added = kept["rows"] + jnp.sum(present, dtype=jnp.int32) * (rows // peers)
            mean = jax.tree.map(lambda s, g: (s / jnp.maximum(count, 1).astype(s.dtype)).astype(g.dtype), total, grads)
            filled = added >= config.batch
            after = jax.tree.map(
                lambda x: jnp.where(filled, jnp.zeros_like(x), x), {"sums": total, "count": count, "rows": added}
            )
            return sums, mean, (filled, jnp.sum(present), after)

        return run

    def wrap(step: InnerStep) -> InnerStep:
        def run(state: TrainState, batch: Any) -> StepResult:
            result = step(state, batch)
            filled, present, kept = result.amax[-1]
            result = result._replace(amax=result.amax[:-1]).with_extra(NAME, kept).skip_where(~filled)
            return result.with_metrics(peers_present=present, batch_filled=filled.astype(jnp.float32))

        return run

    return StepLink(NAME, init, gradients, wrap)


def only_rows_of(present: Bool[Array, " R"], batch: Any) -> Any:
    """Batch in which the rows of absent peers have no targets.

    Args:
        present: peers that are there.
        batch: its rows are split over the peers in order.
    """
    targets = batch.targets
    mask = jnp.repeat(present, targets.shape[0] // present.shape[0], total_repeat_length=targets.shape[0])
    if sharding.current_mesh() is not None:
        mask = jax.sharding.reshard(mask, jax.P(jax.typeof(targets).sharding.spec[0]))
    return batch._replace(targets=jnp.where(mask[:, None], targets, -1))
