"""Step chain: what one training step computes, and the links by which techniques change it or report on it.

    inner step   (state, batch) -> StepResult: loss, gradients, update (``training_step``)
    link         wraps the gradients, or the inner step, and may keep state of its own in ``TrainState.extras``
    report       StepResult -> metrics, after it is known whether the step was skipped
    step         (state, batch) -> (state, metrics): the chain, finished

Links are applied in order, the first one innermost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float

from jaxllm.checkpoint.state_providers import PROVIDERS_KEY
from jaxllm.train.step.loss import LossSums
from jaxllm.train.step.loss_spikes import select_tree
from jaxllm.train.step.train_state import FIELDS, InitExtra, TrainState

Gradients = Callable[..., tuple[Any, ...]]
"""``(state, batch, *inputs) -> (LossSums, gradients[, amax])``."""
Step = Callable[[TrainState, Any], tuple[TrainState, dict[str, Any]]]
"""``(state, batch) -> (state, metrics)``."""


class StepResult(NamedTuple):
    """Result of a step, as links and reports see it.

    Attributes:
        state: after the update.
        sums: loss sums of the batch.
        learning_rate: of the step, for the metrics.
        grad_norm: global norm of the gradients, before clipping.
        grads, updates: gradients, and what is added to the parameters; None for optimizers that never hold them all.
        amax: amax values of fp8_delayed matmuls; empty for other precisions.
        skipped: whether the step leaves parameters and optimizer state as they were; None: steps are never skipped.
        metrics: further metrics, by name; they replace those of reports.
    """

    state: TrainState
    sums: LossSums
    learning_rate: Any
    grad_norm: Float[Array, ""]
    grads: Any = None
    updates: Any = None
    amax: tuple[Any, ...] = ()
    skipped: Bool[Array, ""] | None = None
    metrics: Mapping[str, Any] = MappingProxyType({})

    def with_extra(self, name: str, value: Any) -> StepResult:
        """The result with another state of the link ``name``."""
        return self._replace(state=replace(self.state, extras={**self.state.extras, name: value}))

    def with_metrics(self, **metrics: Any) -> StepResult:
        """The result with further metrics."""
        return self._replace(metrics={**self.metrics, **metrics})

    def skip_where(self, flag: Bool[Array, ""]) -> StepResult:
        """The result, skipped where it was or where ``flag`` is set."""
        return self._replace(skipped=flag if self.skipped is None else self.skipped | flag)


InnerStep = Callable[[TrainState, Any], StepResult]
"""``(state, batch) -> StepResult``."""
Report = Callable[[StepResult], dict[str, Any]]
"""``StepResult -> metrics``."""


@dataclass(frozen=True)
class StepLink:
    """Technique that changes the training step.

    Attributes:
        name: of its state in ``TrainState.extras``, and of the leaves in checkpoints; one without state has none there.
        init: ``params -> state`` before the first step; sharded as the parameters that it is computed from. None: no
            state.
        gradients: wraps the function that takes loss and gradients.
        wrap: wraps the inner step.
        transient: its state is not saved; a resumed run begins with a fresh one.
    """

    name: str
    init: InitExtra | None = None
    gradients: Callable[[Gradients], Gradients] | None = None
    wrap: Callable[[InnerStep], InnerStep] | None = None
    transient: bool = False


def link_states(links: Sequence[StepLink]) -> dict[str, InitExtra]:
    """Initialisers of the links' states by name, as ``abstract_state`` and ``init_state`` take them.

    Raises:
        ValueError: two links have the same name, or one has that of another part of a checkpoint.
    """
    states: dict[str, InitExtra] = {}
    for link in links:
        if link.init is None:
            continue
        if link.name in (*states, *FIELDS, PROVIDERS_KEY):
            raise ValueError(f"step link: the name {link.name!r} is taken; give the link another name.")
        states[link.name] = link.init
    return states


def saved_state(state: TrainState, links: Sequence[StepLink]) -> TrainState:
    """State as checkpoints have it: without the states of transient links."""
    transient = {link.name for link in links if link.transient}
    return replace(state, extras={name: one for name, one in state.extras.items() if name not in transient})


def link_state(state: TrainState, name: str) -> Any:
    """State of a link.

    Raises:
        ValueError: the train state was made without the link.
    """
    if name not in state.extras:
        raise ValueError(
            f"the step has the link {name!r}, but the train state has no such extras (it has: "
            f"{', '.join(state.extras) or 'none'}); give abstract_state and init_state the same links."
        )
    return state.extras[name]


def finished(step: InnerStep, links: Sequence[StepLink] = (), reports: Sequence[Report] = ()) -> Step:
    """Training step from an inner step, its links and its reports."""
    for link in links:
        step = step if link.wrap is None else link.wrap(step)

    def run(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        result = _skip(state, step(state, batch))
        metrics = step_metrics(result)
        for report in reports:
            metrics |= report(result)
        return result.state, {**metrics, **result.metrics}

    return run


def _skip(before: TrainState, result: StepResult) -> StepResult:
    """Keeps the parameters and the optimizer state of before where the step is skipped."""
    skipped = result.skipped
    if skipped is None:
        return result
    no_updates = jax.tree.map(jnp.zeros_like, result.updates)
    old = before.params, before.opt_state, no_updates
    new = result.state.params, result.state.opt_state, result.updates
    params, opt_state, updates = select_tree(skipped, old, new)
    result = result._replace(state=replace(result.state, params=params, opt_state=opt_state), updates=updates)
    return result.with_metrics(skipped=skipped.astype(jnp.float32))


def step_metrics(result: StepResult) -> dict[str, Any]:
    """Metrics that every step has, and those of its objective; ``nll`` is a mean over the batch's target tokens."""
    norms = {}
    if result.updates is not None:
        norms = {"param_norm": optax.tree.norm(result.state.params), "update_norm": optax.tree.norm(result.updates)}
    return {
        **result.sums.means(),
        "nll": result.sums.nll / jnp.maximum(result.sums.count, 1),
        "grad_norm": result.grad_norm,
        **norms,
        "learning_rate": result.learning_rate,
        "tokens": result.sums.count,
    }
