"""Compressed gradients: the sum of gradients over the mesh axis ``data`` sends packed integers or thin factors.

Each device along ``data`` takes the gradients of its own rows. Their mean over the axis is compressed
(``jaxllm.train.outer.compression``, ``jaxllm.train.outer.power_sgd``); over all other axes gradients are summed as
ever. With error feedback a device adds to its gradients what it did not send in earlier steps (arXiv:1901.09847).

Legend: R devices along ``data``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxllm.config import ConfigError
from jaxllm.train.outer.adaptive_step import Choice, measured_errors, no_choices
from jaxllm.train.outer.compression import CompressedMean, PlainMean, parse_compression
from jaxllm.train.outer.lgreco import LayerRanks, LayerwiseRanks
from jaxllm.train.outer.power_sgd import PowerSgd
from jaxllm.train.step.step_chain import Gradients, InnerStep, StepLink, StepResult, link_state
from jaxllm.train.step.train_state import TrainState

AXIS = "data"
"""Mesh axis over which gradients are compressed."""
NAME = "compressed_gradients"
"""Name of the link's state in ``TrainState.extras``, and of its leaves in checkpoints."""


@dataclass(frozen=True)
class GradsConfig:
    """Compression of gradients over the mesh axis ``data``.

    Attributes:
        compress: "int8", "int2", "topk:SHARE", "topk:SHARE,int8" (``jaxllm.train.outer.compression``),
            "powersgd:RANK" (``jaxllm.train.outer.power_sgd``), "lgreco:ERROR" (``jaxllm.train.outer.lgreco``), or "".
        feedback: error feedback: share of what a device did not send that it adds to its next gradients; 0: none; None:
            1 for top-k, PowerSGD and L-GreCo, else 0.
        every: L-GreCo alone: steps between two choices of the ranks, each of which sends all gradients once; None: 100.
        programs: L-GreCo alone: most compiled programs, each with other ranks; None: 4.
    """

    compress: str = ""
    feedback: float | None = None
    every: int | None = None
    programs: int | None = None

    def __post_init__(self) -> None:
        for name in ("every", "programs"):
            given = getattr(self, name)
            if given is not None and (given < 1 or not self.is_adaptive):
                raise ValueError(
                    f'grads: {name} = {given}; give 1 or more, with grads.compress = "lgreco:ERROR", or leave it out.'
                )
        if self.feedback is not None and not 0 <= self.feedback <= 1:
            raise ValueError(f"grads: feedback = {self.feedback}; give a number from 0 (none) to 1.")
        if self.feedback and not self.compress:
            raise ValueError(f"grads: feedback = {self.feedback} without compression; give grads.compress too.")
        if isinstance(self.exchange, CompressedMean) and self.compress and self.exchange.is_exact:
            raise ConfigError(f'grads.compress = "{self.compress}" sends everything; leave it out.')

    @property
    def is_adaptive(self) -> bool:
        """Whether the ranks are re-chosen during the run."""
        return self.compress.partition(":")[0] == "lgreco"

    @property
    def steps_between_choices(self) -> int:
        """``every``, or its default."""
        return 100 if self.every is None else self.every

    @property
    def most_programs(self) -> int:
        """``programs``, or its default."""
        return 4 if self.programs is None else self.programs

    @property
    def exchange(self) -> CompressedMean | PowerSgd | LayerwiseRanks:
        """Mean over ``data`` by what ``compress`` says."""
        name, _, rank = self.compress.partition(":")
        if name == "lgreco":
            return LayerwiseRanks(_budget(rank, self.compress))
        if name != "powersgd":
            return parse_compression(self.compress, "grads.compress")
        if not rank.isdigit() or int(rank) < 1:
            raise ConfigError(f"grads.compress = {self.compress!r}: give a rank of 1 or more, such as powersgd:4.")
        return PowerSgd(int(rank))

    @property
    def error_feedback(self) -> float:
        """Error feedback, or its default."""
        if self.feedback is not None:
            return self.feedback
        exchange = self.exchange
        return 1.0 if isinstance(exchange, PowerSgd | LayerwiseRanks) or exchange.loses else 0.0


def _budget(text: str, given: str) -> float:
    try:
        error = float(text)
    except ValueError:
        error = -1.0
    if not 0 < error < 1:
        raise ConfigError(f"grads.compress = {given!r}: give a relative error above 0 and below 1, such as lgreco:0.3.")
    return error


def compressed_gradients(config: GradsConfig, choice: Choice | None = None) -> StepLink | None:
    """Link that compresses the sum of gradients over ``data``; None without compression.

    Args:
        config: what is sent.
        choice: ranks that were chosen, of L-GreCo; None: those before the first choice.
    """
    if not config.compress:
        return None
    exchange, share = config.exchange, config.error_feedback
    if isinstance(exchange, LayerwiseRanks):
        exchange = replace(exchange, choice=choice)
    low_rank = isinstance(exchange, PowerSgd | LayerwiseRanks)

    def init(params: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if share:
            found["feedback"] = jax.tree.map(_zero_rows, params)
        if isinstance(exchange, PowerSgd | LayerwiseRanks):
            leaves = list(enumerate(jax.tree.leaves(params)))
            means = [low_rank_mean(exchange, number, leaf.shape) for number, leaf in leaves]
            bases = [one and one.basis(leaf.shape, number) for one, (number, leaf) in zip(means, leaves, strict=True)]
            found["basis"] = {str(number): one for number, one in enumerate(bases) if one is not None}
        if config.is_adaptive:
            found |= no_choices(params, config.most_programs)
        return found

    def gradients(take: Gradients) -> Gradients:
        def run(state: TrainState, batch: Any) -> tuple[Any, ...]:
            kept = dict(link_state(state, NAME)) if share or low_rank else {}
            sums, rows = local_gradients(take, state, batch)
            if share:
                rows = jax.tree.map(lambda g, e: g + share * e, rows, kept["feedback"])
            if isinstance(exchange, PowerSgd | LayerwiseRanks):
                grads, known, kept["basis"] = _low_rank(exchange, rows, kept["basis"], state.params)
            else:
                grads, known = _packed(exchange, rows, state.params)
            if share:
                kept["feedback"] = jax.tree.map(lambda g, k: g - k, rows, known)
            return sums, grads, kept

        return run

    def wrap(step: InnerStep) -> InnerStep:
        def run(state: TrainState, batch: Any) -> StepResult:
            result = step(state, batch)
            kept = result.amax[-1]
            return result.with_extra(NAME, kept)._replace(amax=result.amax[:-1])

        return run

    stateless = not share and not low_rank
    if stateless:
        return StepLink(NAME, gradients=lambda take: lambda state, batch: gradients(take)(state, batch)[:2])
    return StepLink(NAME, init, gradients, wrap)


def gradient_errors(config: GradsConfig, take: Gradients) -> Callable[[TrainState, Any], dict[str, jax.Array]]:
    """Function that measures what low ranks would lose of a batch's gradients and of what was not sent before.

    It sends the gradients whole.

    Args:
        config: what is sent.
        take: gradients of a state on a batch.

    Returns:
        ``(state, batch) -> errors`` (``adaptive_step.measured_errors``), the same on all devices.
    """

    def run(state: TrainState, batch: Any) -> dict[str, jax.Array]:
        _, rows = local_gradients(take, state, batch)
        if config.error_feedback:
            kept = link_state(state, NAME)["feedback"]
            rows = jax.tree.map(lambda g, e: g + config.error_feedback * e, rows, kept)
        return measured_errors(jax.tree.map(lambda g: g.mean(0), rows))

    return run


def low_rank_mean(
    exchange: PowerSgd | LayerwiseRanks, number: int, shape: tuple[int, ...]
) -> PowerSgd | LayerRanks | None:
    """Low-rank mean of a parameter; None: it is averaged whole.

    Args:
        exchange: of all parameters.
        number, shape: of the parameter.
    """
    if isinstance(exchange, LayerwiseRanks):
        return exchange.of(number, shape)
    return exchange if exchange.shape(shape) is not None else None


def compressed_bytes(exchange: CompressedMean | PowerSgd | LayerwiseRanks, params: Any, devices: int) -> int:
    """Bytes that one device sends over ``data`` in a step, by formula.

    Args:
        exchange: of the gradients.
        params: shapes and shardings of the parameters on the run's mesh.
        devices: along ``data``.
    """

    def leaf_bytes(number: int, leaf: jax.ShapeDtypeStruct) -> int:
        assert leaf.sharding is not None
        dtype, size = jnp.dtype(leaf.dtype), math.prod(leaf.sharding.shard_shape(leaf.shape))
        if not isinstance(exchange, PowerSgd | LayerwiseRanks):
            return exchange.sent(size, dtype, devices)
        one = low_rank_mean(exchange, number, leaf.shape)
        return PlainMean().sent(size if one is None else one.sent(leaf) // dtype.itemsize, dtype, devices)

    return sum(leaf_bytes(number, leaf) for number, leaf in enumerate(jax.tree.leaves(params)))


def local_gradients(take: Gradients, state: TrainState, batch: Any) -> tuple[Any, Any]:
    """Loss sums of the whole batch, and gradients of each device's rows along ``data`` as rows [R, ...].

    The rows are scaled so that their mean is the gradient of the whole batch's mean loss.

    Args:
        take: gradients of a state on a batch.
        state, batch: on the whole mesh.
    """

    def local(state: TrainState, batch: Any) -> tuple[Any, Any]:
        sums, grads = take(state, batch)
        here = jnp.maximum(sums.total, 1)
        sums = jax.tree.map(lambda x: jax.lax.psum(x, AXIS), sums)
        weight = here * jax.lax.axis_size(AXIS) / jnp.maximum(sums.total, 1)
        return sums, jax.tree.map(lambda g: (g * weight.astype(g.dtype))[None], grads)

    whole, rows = PartitionSpec(), PartitionSpec(AXIS)
    # check_vma=False: otherwise gradients of parameters that all devices share would be summed here already.
    run = jax.shard_map(local, in_specs=(whole, rows), out_specs=(whole, rows), axis_names={AXIS}, check_vma=False)
    return run(replace(state, extras={}), batch)


def _packed(exchange: CompressedMean, rows: Any, params: Any) -> tuple[Any, Any]:
    """Mean of rows, and what of them was sent; on the shards of every device."""
    out = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, params)
    given = jax.tree.map(lambda spec: PartitionSpec(AXIS, *spec), out, is_leaf=lambda x: isinstance(x, PartitionSpec))

    def local(rows: Any) -> tuple[Any, Any]:
        def leaf(x: jax.Array) -> tuple[jax.Array, jax.Array]:
            mean, known = exchange.mean(x.reshape(-1), AXIS)
            return mean.reshape(x.shape[1:]), known.reshape(x.shape)

        leaves, structure = jax.tree.flatten(rows)
        pairs = [leaf(x) for x in leaves]
        return structure.unflatten([mean for mean, _ in pairs]), structure.unflatten([known for _, known in pairs])

    rows = jax.tree.map(jax.sharding.reshard, rows, given)
    # check_vma=False: means of gathered messages are equal on all devices, which types cannot say.
    return jax.shard_map(local, in_specs=(given,), out_specs=(out, given), check_vma=False)(rows)


def _low_rank(
    exchange: PowerSgd | LayerwiseRanks, rows: Any, bases: dict[str, Any], params: Any
) -> tuple[Any, Any, dict[str, Any]]:
    """Mean of rows by PowerSGD, what of each row it stands for, and the next bases."""
    structure = jax.tree.structure(rows)
    of_leaf = [low_rank_mean(exchange, number, leaf.shape[1:]) for number, leaf in enumerate(jax.tree.leaves(rows))]

    def local(leaves: list[Any], bases: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        means, after = [], {}
        for number, (leaf, one) in enumerate(zip(leaves, of_leaf, strict=True)):
            if one is None:
                means.append(jax.lax.pmean(leaf[0], AXIS))
                continue
            basis = bases[str(number)]
            mean, new = one.mean(leaf[0], basis, AXIS)
            means.append(mean)
            after[str(number)] = new.astype(basis.dtype)
        return means, after

    whole, own = PartitionSpec(), PartitionSpec(AXIS)
    # check_vma=False: products of means are equal on all devices, which the QR decomposition does not say.
    run = jax.shard_map(local, in_specs=(own, whole), out_specs=whole, axis_names={AXIS}, check_vma=False)
    leaves = jax.tree.leaves(rows)
    means, after = run(leaves, bases)
    means = [mean.astype(like.dtype) for mean, like in zip(means, jax.tree.leaves(params), strict=True)]

    def known_of(mean: jax.Array, row: jax.Array, one: PowerSgd | LayerRanks | None) -> jax.Array:
        if one is None:
            return row
        same = jnp.broadcast_to(mean[None], row.shape)
        if not isinstance(one, LayerRanks) or not one.whole.any():
            return same
        return jnp.where(one.whole.reshape(1, -1, *(1,) * (row.ndim - 2)), row, same)

    known = [known_of(*given) for given in zip(means, leaves, of_leaf, strict=True)]
    return structure.unflatten(means), structure.unflatten(known), after


def _zero_rows(leaf: jax.Array) -> jax.Array:
    devices = jax.sharding.get_abstract_mesh().shape.get(AXIS, 1)
    zeros = jnp.zeros((devices, *leaf.shape), leaf.dtype)
    return jax.sharding.reshard(zeros, PartitionSpec(AXIS, *jax.typeof(leaf).sharding.spec))
