"""Adapter configuration of a run, and what a method of adaptation says of itself: one row of the method table."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
from flax import nnx

from jaxllm.models import DecoderConfig
from jaxllm.models.functional import DeclaredParam, LinearShape, Params
from jaxllm.models.params import Role, declare
from jaxllm.peft.low_rank_factors import LowRank, factor_axes

AdapterName = Literal[
    "none", "lora", "rslora", "dora", "qlora", "lora_ga", "longlora", "prefix", "prompt", "mixlora", "pesc"
]


@dataclass(frozen=True)
class AdapterConfig:
    """Adapter that is trained beside a frozen base (``RunConfig.init_from``).

    Attributes:
        kind: the method, a row of ``jaxllm.peft.method_table``; "none" trains the model itself.
        rank: rank of the factors.
        alpha: the product of the factors is scaled by alpha / rank ("rslora": by alpha / sqrt(rank)).
        targets: the matmuls of blocks that are adapted, by a name on their path ("attention", "mlp", "q"; "*" for all)
            or by a pattern of whole paths ("segments/0/*").
        group: "longlora": tokens of a group that attend to each other; 0 for a quarter of the sequence.
        tokens: "prefix" and "prompt": number of virtual tokens; each row of training has them first.
        experts: "mixlora" and "pesc": number of experts of a feed-forward layer.
        top_k: "mixlora" and "pesc": experts per token.
        width: "pesc": inner width of an expert's adapter.
        gradient_batches: "lora_ga": the first batches of the run over which the gradient is taken that it starts from.
    """

    kind: AdapterName = "none"
    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ("attention", "mlp")
    group: int = 0
    tokens: int = 20
    experts: int = 8
    top_k: int = 2
    width: int = 64
    gradient_batches: int = 1

    def __post_init__(self) -> None:
        split = tuple(name for one in self.targets for name in one.split(",") if name)
        object.__setattr__(self, "targets", split)  # "attention,mlp" is one word of a command line
        if self.rank < 1:
            raise ValueError(f"adapter.rank = {self.rank}; give a positive number.")
        if self.alpha <= 0:
            raise ValueError(f"adapter.alpha = {self.alpha}; give a positive number.")
        if self.group < 0 or (self.group and self.kind != "longlora"):
            raise ValueError(f"adapter.group = {self.group}: only longlora has groups; give it 0 or a positive number.")
        if self.tokens < 1:
            raise ValueError(f"adapter.tokens = {self.tokens}; give a positive number.")
        if self.gradient_batches < 1:
            raise ValueError(f"adapter.gradient_batches = {self.gradient_batches}; give a positive number.")
        if not self.targets:
            raise ValueError('adapter.targets is empty; give names such as "attention" and "mlp".')

    def __bool__(self) -> bool:
        """Whether there is an adapter."""
        return self.kind != "none"

    @property
    def has_experts(self) -> bool:
        """Whether the adapter makes a mixture of experts of feed-forward layers."""
        return self.kind in ("mixlora", "pesc")

    @property
    def virtual_tokens(self) -> int:
        """Places at the start of each row that virtual tokens take."""
        return self.tokens if self.kind in ("prefix", "prompt") else 0


@dataclass(frozen=True)
class AdapterMethod:
    """Method of adaptation: how a targeted ``Linear`` is declared and what its weight is before training, or what
    else the adapted model has.

    Attributes:
        declare: ``(config, base, linear) -> weight``: the adapted weight, with declarations in place of arrays; None:
            no ``Linear`` is adapted.
        start: ``(config, weight, linear, gradient) -> weight``: the weight before training, from one with a dense base
            and the drawn factors; run under the mesh. The gradient of the base is None where it is not needed, or where
            a checkpoint will replace the adapter.
        trained: patterns of the parameters that are trained (``jaxllm.models.param_subset``).
        kept: patterns of further parameters that are no part of the base, and saved.
        needs_gradients: whether ``start`` needs the base's gradient on the first batches.
        context: makes what makes the attention context of training, ``(segment_ids, layout) -> context``; None: that
            of all passes.
        text_context: makes what makes the attention context of all passes over packed rows; None: the model's own.
        architecture: ``(config, base) -> adapted``: architecture of the adapted model; None: the base's.
        start_rest: ``(config, params) -> params``: gives parameters that the base lacks their values before training,
            after they were drawn as they are declared; run under the mesh.
        experts: whether it adapts the matrices of experts.
        not_adapted: names on the paths of targets that ``declare`` leaves as they are.
        fields: fields of the configuration that it follows.
    """

    declare: Callable[[AdapterConfig, DeclaredParam, LinearShape], Any] | None = None
    start: Callable[[AdapterConfig, Any, LinearShape, Any], Any] = lambda config, weight, linear, gradient: weight
    trained: tuple[str, ...] = ("adapter",)
    kept: tuple[str, ...] = ()
    needs_gradients: bool = False
    context: Callable[[AdapterConfig], Callable[..., Any]] | None = None
    text_context: Callable[[AdapterConfig], Callable[..., Any]] | None = None
    architecture: Callable[[AdapterConfig, DecoderConfig], DecoderConfig] | None = None
    start_rest: Callable[[AdapterConfig, Params], Params] = lambda config, params: params
    experts: bool = False
    not_adapted: tuple[str, ...] = ()
    fields: tuple[str, ...] = ("rank", "alpha", "targets")


def lora_scale(config: AdapterConfig) -> float:
    """Scale of LoRA: alpha / rank."""
    return config.alpha / config.rank


def declare_factors(config: AdapterConfig, linear: LinearShape, scale: float) -> LowRank:
    """Declared factors of a ``Linear``: ``a`` is drawn with the variance 1 / (3 inputs), ``b`` is zero.

    The variance is that of PEFT, which draws uniformly from ``+-1 / sqrt(inputs)``.
    """
    inputs, outputs, lead = linear.inputs, linear.outputs, linear.shape[: linear.lead]
    of_a, of_b = factor_axes(linear.axes, linear.lead + linear.contract, linear.lead)
    std = 1 / math.sqrt(3 * math.prod(inputs))

    def factor(shape: tuple[int, ...], axes: Any, std: float) -> DeclaredParam:
        role: Role = "adapter"
        return DeclaredParam(declare(nnx.Param, shape, axes, linear.dtype, role, std=std), linear.stack)

    return LowRank(
        factor((*lead, *inputs, config.rank), of_a, std), factor((*lead, config.rank, *outputs), of_b, 0.0), scale
    )


def is_declared(node: Any) -> bool:
    """Whether a node of a parameter tree is a declaration."""
    return isinstance(node, DeclaredParam)


def stacked(fn: Callable[..., Any], linear: LinearShape) -> Callable[..., Any]:
    """Function of one layer's weight as one of the stack of layers."""
    for _ in linear.stack:
        fn = jax.vmap(fn)
    return fn
