"""What an optimizer is: its rule, its numbers, its schedule."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from jaxllm.optim.adam8bit import Moments
from jaxllm.optim.bfloat16_params import Rounding
from jaxllm.optim.schedules import ScheduleConfig

OptimizerKind = Literal[
    "adamw",
    "lion",
    "adafactor",
    "muon",
    "galore",
    "apollo",
    "apollo_mini",
    "soap",
    "schedule_free",
    "sophia",
    "lomo",
    "adalomo",
    "mezo",
    "sgd",
]

FIELDS_OF_KIND: dict[str, frozenset[str]] = {
    "adamw": frozenset({"b1", "b2", "eps", "moments"}),
    "lion": frozenset({"b1", "b2"}),
    "adafactor": frozenset({"eps"}),
    "muon": frozenset({"b1", "b2", "eps"}),
    "galore": frozenset({"b1", "b2", "eps", "rank", "refresh", "moments"}),
    "apollo": frozenset({"b1", "b2", "eps", "rank", "refresh", "moments"}),
    "apollo_mini": frozenset({"b1", "b2", "eps", "refresh", "moments"}),
    "soap": frozenset({"b1", "b2", "eps", "refresh"}),
    "schedule_free": frozenset({"b1", "b2", "eps"}),
    "sophia": frozenset({"b1", "b2", "eps", "refresh"}),
    "lomo": frozenset(),
    "adalomo": frozenset({"eps"}),
    "mezo": frozenset(),
    "sgd": frozenset({"b1"}),
}
"""Fields that a rule has; another that was changed is refused."""
PAPER_REFRESH = {"galore": 200, "apollo": 200, "apollo_mini": 200, "soap": 10, "sophia": 10}
"""Steps that the papers have."""
FORMER_DEFAULTS = {"refresh": 200}
"""What fields had by default before: configurations of older runs say so of every rule."""
LAYERWISE = ("lomo", "adalomo", "mezo")
"""Rules that never have all gradients at once."""
FLOAT32_STATE = (*LAYERWISE, "soap", "schedule_free", "sophia")
"""Rules whose state is float32 as parameters are: bases, iterates, curvature."""
COLLAGE_KINDS = ("adamw", "lion", "sgd")
"""Rules whose state is moments of gradients, of which Collage says which are to be pairs."""


@dataclass(frozen=True)
class OptimConfig:
    """An optimizer.

    Attributes:
        schedule: the learning rate.
        kind: the rule, and what it keeps for each parameter in float32.
            "adamw": 8 bytes (arXiv:1711.05101).
            "lion": 4 bytes; the sign of a momentum. Its paper takes a learning rate 3 to 10 times smaller, a decay as
            much larger, and b1 = 0.95, b2 = 0.98 for language models (arXiv:2302.06675).
            "adafactor": 4 bytes for each row and column of a matrix instead of each element, no momentum
            (arXiv:1804.04235, without its schedule of learning rates).
            "muon": 4 bytes for matrices within layers, whose momentum is made orthogonal and scaled to the size of
            AdamW's updates, so that it takes AdamW's learning rate; AdamW for the others (arXiv:2502.16982).
            "galore", "apollo", "apollo_mini": 8 bytes for each of rank * n numbers of a matrix of m * n, m the smaller
            side, and GaLore 4 more for each of rank * m; AdamW for embeddings and the like
            (``jaxllm.optim.low_rank``: arXiv:2403.03507, arXiv:2412.05270).
            "soap": 8 bytes, and 8 m^2 + 8 n^2 a matrix: Adam in the eigenbasis of Shampoo's preconditioner; AdamW for
            embeddings and the like (``jaxllm.optim.soap``: arXiv:2409.11321).
            "schedule_free": 8 bytes; AdamW with an average of its iterates, which are the parameters, in a schedule's
            stead (``jaxllm.optim.schedule_free``: arXiv:2405.15682).
            "sophia": 8 bytes; a clipped step over an estimate of the Hessian's diagonal, Gauss-Newton-Bartlett, from
            labels that the model draws: every ``refresh`` steps one more forward and backward pass. Its paper has b1 =
            0.965, b2 = 0.99 (``jaxllm.optim.sophia``, ``jaxllm.train.step.sophia_hessian``: arXiv:2305.14342).
            "lomo": none; gradient descent, each layer moved in the backward pass, before the next gradient exists
            (``jaxllm.train.step.lomo``: arXiv:2306.09782).
            "adalomo": 4 bytes for each row and column of a matrix; likewise, Adafactor's step times the parameter's
            size (arXiv:2310.10195).
            "mezo": none; two forward passes and no backward one, for tuning a trained model
            (``jaxllm.train.step.mezo``: arXiv:2305.17333; ZO2, arXiv:2503.12668).
            "sgd": 4 bytes; momentum b1.
        moments: "float32", or "8bit": blocks of at most 256 with a scale each, 2 bytes and 8 for a block instead of 8
            bytes, of matrices within layers (``jaxllm.optim.adam8bit``: 8-bit Adam, arXiv:2110.02861; 8-bit GaLore).
        b1, b2: decay of the first and second moment. Lion: of the update's momentum and the kept one. Muon: 0.95 is the
            momentum of matrices whatever these are, which are AdamW's for the others.
        eps: added to the root of the second moment; of Adafactor to squares of gradients.
        rank: of GaLore and APOLLO; 0 for a quarter of a matrix's smaller side.
        refresh: steps between two of their projections, SOAP's eigenbases, Sophia's estimates; 0 for the paper's: 200,
            10 and 10.
        weight_decay: decoupled decay of matrices and embeddings; gains and biases are left alone.
        rounding: of parameters in bfloat16, to the "nearest" number; or of them and the rule's state, which is then in
            bfloat16 as well, up or down at random ("stochastic"), or to two numbers that are added ("collage"; AdamW,
            Lion, SGD). See ``jaxllm.optim.bfloat16_params``.
        clip_norm: gradients of a larger global norm are scaled down to it; None for no clipping.
    """

    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    kind: OptimizerKind = "adamw"
    moments: Moments = "float32"
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    rank: int = 0
    refresh: int = 0
    weight_decay: float = 0.1
    rounding: Rounding = "nearest"
    clip_norm: float | None = 1.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(OptimizerKind):
            raise ValueError(f"optim: kind = {self.kind!r}; legal: {', '.join(get_args(OptimizerKind))}.")
        defaults: dict[str, Any] = {one.name: one.default for one in dataclasses.fields(self)}
        for name in ("b1", "b2", "eps", "rank", "refresh", "moments"):
            if name not in FIELDS_OF_KIND[self.kind] and getattr(self, name) not in (
                defaults[name],
                FORMER_DEFAULTS.get(name),
            ):
                raise ValueError(
                    f'optim: "{self.kind}" has no {name}; it has {", ".join(sorted(FIELDS_OF_KIND[self.kind])) or "none"}.'
                )
        if self.rounding == "collage" and self.kind not in COLLAGE_KINDS:
            raise ValueError(
                f'optim: rounding = "collage" is of {", ".join(COLLAGE_KINDS)}; give "{self.kind}" rounding = "stochastic".'
            )
        if self.rounding != "nearest" and (self.kind in FLOAT32_STATE or self.moments != "float32"):
            said = f'kind = "{self.kind}"' if self.kind in FLOAT32_STATE else f'moments = "{self.moments}"'
            raise ValueError(f'optim: {said} has no rounding = "{self.rounding}"; give "nearest".')
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optim: {name} = {getattr(self, name)}; it must lie in [0, 1).")
        for name, least in (("rank", 0), ("refresh", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"optim: {name} = {getattr(self, name)}; give {least} or more.")
        if not self.eps > 0:
            raise ValueError(f"optim: eps = {self.eps}; give a positive number.")
        if not self.weight_decay >= 0:
            raise ValueError(f"optim: weight_decay = {self.weight_decay}; give 0 (none) or a positive number.")
        if self.moments not in get_args(Moments):
            raise ValueError(f"optim: moments = {self.moments!r}; legal: {', '.join(get_args(Moments))}.")
        if self.kind in LAYERWISE and self.clip_norm is not None:
            raise ValueError(
                f'optim: "{self.kind}" never has all gradients, so there is no norm of them to clip by; set clip_norm '
                "to None."
            )
        if self.kind == "schedule_free" and self.schedule.kind != "constant":
            raise ValueError(
                f'optim: "schedule_free" stands in for a falling learning rate, and schedule.kind = '
                f'"{self.schedule.kind}"; choose "constant".'
            )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"optim: clip_norm = {self.clip_norm}; give a positive number, or None for no clipping.")

    @property
    def every(self) -> int:
        """``refresh``, or the paper's."""
        return self.refresh or PAPER_REFRESH[self.kind]
