"""Optimizer table: a row for each optimizer, by the name that ``OptimConfig.kind`` takes.

Everything that differs between optimizers is in its row; nothing else compares their names. The table is open: a
program adds an optimizer of its own by ``OPTIMIZERS["name"] = OptimizerSpec(...)``, before it makes a configuration.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import optax

from jaxllm.optim.adafactor import scale_by_adafactor
from jaxllm.optim.adam8bit import quantise_moments
from jaxllm.optim.compact import projected_gradients, scale_by_compact_adam
from jaxllm.optim.layerwise_rules import scale_by_param_rms
from jaxllm.optim.low_rank import LowRank, scale_by_low_rank
from jaxllm.optim.matrix_params import decay_mask
from jaxllm.optim.muon import scale_by_muon_or_adam
from jaxllm.optim.optimizer_spec import Links, OptimizerSpec, Rule, StepHooks, decayed
from jaxllm.optim.param_groups import auto_sharded, partition_matrices
from jaxllm.optim.schedule_free import gradients_between_iterates, schedule_free
from jaxllm.optim.soap import scale_by_soap
from jaxllm.optim.sophia import scale_by_sophia

ADAM = frozenset({"b1", "b2", "eps"})
LAYER_BY_LAYER = "updates layer by layer"


def _adam(config: Any, logical_axes: Any) -> optax.GradientTransformation:
    """Adam, with 8-bit moments of matrices within layers where the configuration says so."""
    plain = optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)
    if config.moments == "float32":
        return plain
    small = auto_sharded(quantise_moments(config.moments, plain, first="mu", second="nu"))
    return partition_matrices(logical_axes, lambda _: small, plain)


def _adan(config: Any, logical_axes: Any) -> optax.GradientTransformation:
    """Adan (arXiv:2208.06677) with its paper's betas; its state is three moments and the last gradient."""
    return optax.scale_by_adan(eps=config.eps)


def _low_rank(kind: LowRank) -> Rule:
    """Rule of GaLore or APOLLO."""

    def rule(config: Any, logical_axes: Any) -> optax.GradientTransformation:
        adam = config.b1, config.b2, config.eps
        return scale_by_low_rank(logical_axes, kind, config.rank, config.every, *adam, config.moments)

    return rule


def _compact(config: Any, logical_axes: Any) -> optax.GradientTransformation:
    return scale_by_compact_adam(logical_axes, config.rank, config.every, config.b1, config.b2, config.eps)


def _adafactor(config: Any, logical_axes: Any) -> optax.GradientTransformation:
    return scale_by_adafactor(logical_axes, config.eps)


def _schedule_free(config: Any, logical_axes: Any, rate: optax.Schedule) -> Links:
    """Schedule-free AdamW, whose one link applies weight decay and learning rate to its iterates."""
    mask = decay_mask(logical_axes)
    return (schedule_free(rate, config.b1, config.b2, config.eps, config.weight_decay, mask),)


def _hooks_of_step(name: str) -> Callable[[Any, Any], StepHooks]:
    """Hooks that are a function of ``jaxllm.train.step``, "module:function".

    They lie a floor above, because they compute losses, and are imported when a step is built.
    """

    def hooks(run: Any, model: Any) -> StepHooks:
        module, function = name.split(":")
        return getattr(importlib.import_module(f"jaxllm.train.step.{module}"), function)(run, model)

    return hooks


OPTIMIZERS: dict[str, OptimizerSpec] = {
    "adamw": OptimizerSpec(
        decayed(_adam), ADAM | {"moments"}, streamable=True, elementwise=True, collage=True, arrays=2, counters=2
    ),
    "lion": OptimizerSpec(
        decayed(lambda config, _: optax.scale_by_lion(b1=config.b1, b2=config.b2)),
        frozenset({"b1", "b2"}),
        streamable=True,
        elementwise=True,
        collage=True,
        arrays=1,
        counters=2,
    ),
    "adan": OptimizerSpec(decayed(_adan), frozenset({"eps"}), arrays=4, counters=2),
    "adafactor": OptimizerSpec(decayed(_adafactor), frozenset({"eps"}), streamable=True),
    "muon": OptimizerSpec(
        decayed(lambda config, axes: scale_by_muon_or_adam(axes, config.b1, config.b2, config.eps)), ADAM
    ),
    "galore": OptimizerSpec(decayed(_low_rank("galore")), ADAM | {"rank", "refresh", "moments"}, refresh=200),
    "apollo": OptimizerSpec(decayed(_low_rank("apollo")), ADAM | {"rank", "refresh", "moments"}, refresh=200),
    "apollo_mini": OptimizerSpec(decayed(_low_rank("apollo_mini")), ADAM | {"refresh", "moments"}, refresh=200),
    "compact": OptimizerSpec(
        decayed(_compact),
        ADAM | {"rank", "refresh"},
        refresh=200,
        projected=True,
        why_not_staged="projects gradients where they are computed",
        hooks=lambda run, model: StepHooks(
            gradients=projected_gradients(model.logical_axes(), run.optim.rank, run.optim.every)
        ),
    ),
    "soap": OptimizerSpec(
        decayed(lambda config, axes: scale_by_soap(axes, config.every, config.b1, config.b2, config.eps)),
        ADAM | {"refresh"},
        refresh=10,
        float32_state=True,
    ),
    "schedule_free": OptimizerSpec(
        _schedule_free,
        ADAM,
        float32_state=True,
        averaging=True,
        subsets=True,
        hooks=lambda run, model: StepHooks(gradients=gradients_between_iterates(run.optim.b1)),
    ),
    "sophia": OptimizerSpec(
        decayed(lambda config, _: scale_by_sophia(config.b1, config.b2, config.eps)),
        ADAM | {"refresh"},
        refresh=10,
        float32_state=True,
        one_pass=False,
        cross_entropy_only=True,
        why_not_staged="samples labels from the model's logits",
        subsets=True,
        hooks=_hooks_of_step("sophia_hessian:sophia_hooks"),
    ),
    "lomo": OptimizerSpec(
        decayed(),
        layerwise=True,
        float32_state=True,
        one_pass=False,
        why_not_staged=LAYER_BY_LAYER,
        subsets=True,
        hooks=_hooks_of_step("lomo:lomo_hooks"),
    ),
    "adalomo": OptimizerSpec(
        decayed(_adafactor, lambda _, axes: scale_by_param_rms(axes)),
        frozenset({"eps"}),
        layerwise=True,
        float32_state=True,
        one_pass=False,
        why_not_staged=LAYER_BY_LAYER,
        subsets=True,
        hooks=_hooks_of_step("lomo:lomo_hooks"),
    ),
    "mezo": OptimizerSpec(
        decayed(),
        layerwise=True,
        float32_state=True,
        deferred=True,
        passes=0,
        one_pass=False,
        why_not_staged=LAYER_BY_LAYER,
        subsets=True,
        hooks=_hooks_of_step("zo2:zo2_hooks"),
    ),
    "sgd": OptimizerSpec(
        decayed(lambda config, _: optax.trace(decay=config.b1)),
        frozenset({"b1"}),
        streamable=True,
        elementwise=True,
        collage=True,
        arrays=1,
        counters=1,
    ),
}
"""Optimizers by name."""


def kinds_where(holds: Callable[[OptimizerSpec], bool]) -> tuple[str, ...]:
    """Names of the optimizers whose row satisfies a condition, in the order of the table."""
    return tuple(kind for kind, spec in OPTIMIZERS.items() if holds(spec))
