"""OptimizerSpec: what a row of the optimizer table says of an optimizer, and the hooks by which it changes the step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import optax

from jaxllm.optim.matrix_params import decay_mask

Links = tuple[optax.GradientTransformation, ...]
"""Links of an optax chain, from clipped gradients to what is added to the parameters."""
Rule = Callable[[Any, Any], optax.GradientTransformation]
"""``(OptimConfig, logical axes) -> transformation`` of gradients to updates before weight decay and learning rate."""
MakeLinks = Callable[[Any, Any, optax.Schedule], Links]
"""``(OptimConfig, logical axes, learning-rate schedule) -> links``."""


class DifferentiatedTree(NamedTuple):
    """Tree that gradients are taken of, in the place of the parameters.

    Attributes:
        of_params: ``parameters -> tree``; the gradients have its shapes, dtypes and shardings.
        into_params: ``(tree, parameters) -> parameters`` of the forward pass.
    """

    of_params: Callable[[Any], Any]
    into_params: Callable[[Any, Any], Any]


@dataclass(frozen=True)
class StepHooks:
    """Parts of the training step that an optimizer replaces or adds; None: as for AdamW.

    Attributes:
        gradients: ``value_and_grad -> ((state, batch, *numerics) -> (sums, gradients, *amax))``: gradients at another
            point than the parameters (schedule-free AdamW), or from several evaluations.
        update_inputs: ``(state, batch) -> dict`` of extra arguments of the optimizer's ``update`` (Sophia's Hessian).
        update: ``(state, batch) -> LayerwiseResult``, the whole update of an optimizer that never holds all gradients
            (``jaxllm.train.step.lomo``).
        settle: ``state -> state`` with the pending update applied, for an optimizer that applies a step's update in
            the next one (``OptimizerSpec.deferred``).
    """

    gradients: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    update_inputs: Callable[[Any, Any], dict[str, Any]] | None = None
    update: Callable[[Any, Any], Any] | None = None
    settle: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class OptimizerSpec:
    """Row of the optimizer table (``jaxllm.optim.optimizer_table``).

    Attributes:
        links: makes the links of the optax chain after gradient clipping; ``decayed`` makes them of a rule.
        fields: fields of ``OptimConfig`` that the optimizer uses, of those that not all use; setting another one is an
            error.
        refresh: default of the field ``refresh``, in steps.
        layerwise: updates layer by layer in a step of its own and never holds all gradients.
        streamable: supports optimizer offload: the state is stacked as layers are, and that of a layer depends on its
            gradients alone.
        elementwise: each element of update and state depends on the same element of parameter, gradient and state
            alone, so that a device can compute any part of an array (uneven optimizer state).
        float32_state: the state must be float32, as the parameters are: bases, iterates, Hessian.
        collage: supports rounding = "collage": the state is moments of gradients.
        averaging: the parameters are an average of iterates: the learning rate must not decay and updates cannot be
            scaled.
        deferred: with parameter offload, a step's update is applied in the next step, and before the state is saved or
            evaluated (``StepHooks.settle``).
        passes: forward and backward passes per step with gradients of all parameters; 0: none (no backward pass).
        one_pass: the update needs the gradients of one pass at the parameters alone, as loss scaling and delayed fp8
            scaling require.
        projected: gradients of matrices are projected in the backward pass and do not exist whole
            (``StepHooks.gradients``).
        cross_entropy_only: the state is an estimate for next-token cross-entropy, and for no other objective.
        why_not_staged: why it does not support pipeline parallelism, as "samples labels"; empty: it does.
        arrays: for the planner: the state, with float32 moments and rounding to nearest, is so many arrays for each
            parameter, of its shape and dtype, and ``counters`` int32 scalars. None: evaluated abstractly.
        subsets: whether the step of its own updates a subset of the parameters where a run trains one.
        hooks: ``(run configuration, model) -> StepHooks``; None: none.
    """

    links: MakeLinks
    fields: frozenset[str] = frozenset()
    refresh: int = 0
    layerwise: bool = False
    streamable: bool = False
    elementwise: bool = False
    float32_state: bool = False
    collage: bool = False
    averaging: bool = False
    deferred: bool = False
    passes: int = 1
    one_pass: bool = True
    projected: bool = False
    cross_entropy_only: bool = False
    why_not_staged: str = ""
    arrays: int | None = None
    counters: int = 0
    subsets: bool = False
    hooks: Callable[[Any, Any], StepHooks] | None = None


def decayed(*rules: Rule) -> MakeLinks:
    """Links of some rules, then decoupled weight decay of matrices and embeddings, then the learning rate."""

    def links(config: Any, logical_axes: Any, rate: optax.Schedule) -> Links:
        decay = optax.add_decayed_weights(config.weight_decay, mask=decay_mask(logical_axes))
        return *(rule(config, logical_axes) for rule in rules), decay, optax.scale_by_learning_rate(rate)

    return links
