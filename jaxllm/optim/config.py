"""What an optimizer is: its rule, its numbers, its schedule."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from jaxllm.optim.narrow import Rounding
from jaxllm.optim.schedules import ScheduleConfig

Kind = Literal["adamw", "lion", "adafactor", "muon", "galore", "apollo", "apollo_mini", "sgd"]

USES: dict[str, frozenset[str]] = {
    "adamw": frozenset({"b1", "b2", "eps"}),
    "lion": frozenset({"b1", "b2"}),
    "adafactor": frozenset({"eps"}),
    "muon": frozenset({"b1", "b2", "eps"}),
    "galore": frozenset({"b1", "b2", "eps", "rank", "refresh"}),
    "apollo": frozenset({"b1", "b2", "eps", "rank", "refresh"}),
    "apollo_mini": frozenset({"b1", "b2", "eps", "refresh"}),
    "sgd": frozenset({"b1"}),
}
"""Numbers that a rule has; another that was changed is refused."""
PAIRS = ("adamw", "lion", "sgd")
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
            "sgd": 4 bytes; momentum b1.
        b1, b2: decay of the first and second moment. Lion: of the update's momentum and the kept one. Muon: 0.95 is the
            momentum of matrices whatever these are, which are AdamW's for the others.
        eps: added to the root of the second moment; of Adafactor to squares of gradients.
        rank: of GaLore and APOLLO; 0 for a quarter of a matrix's smaller side.
        refresh: steps between two projections of theirs.
        weight_decay: decoupled decay of matrices and embeddings; gains and biases are left alone.
        rounding: of parameters in bfloat16, to the "nearest" number; or of them and the rule's state, which is then in
            bfloat16 as well, up or down at random ("stochastic"), or to two numbers that are added ("collage"; AdamW,
            Lion, SGD). See ``jaxllm.optim.narrow``.
        clip_norm: gradients of a larger global norm are scaled down to it; None for no clipping.
    """

    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    kind: Kind = "adamw"
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    rank: int = 0
    refresh: int = 200
    weight_decay: float = 0.1
    rounding: Rounding = "nearest"
    clip_norm: float | None = 1.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"optim: kind = {self.kind!r}; legal: {', '.join(get_args(Kind))}.")
        defaults: dict[str, Any] = {one.name: one.default for one in dataclasses.fields(self)}
        for name in ("b1", "b2", "eps", "rank", "refresh"):
            if name not in USES[self.kind] and getattr(self, name) != defaults[name]:
                raise ValueError(f'optim: "{self.kind}" has no {name}; it has {", ".join(sorted(USES[self.kind]))}.')
        if self.rounding == "collage" and self.kind not in PAIRS:
            raise ValueError(
                f'optim: rounding = "collage" is of {", ".join(PAIRS)}; give "{self.kind}" rounding = "stochastic".'
            )
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optim: {name} = {getattr(self, name)}; it must lie in [0, 1).")
        for name, least in (("rank", 0), ("refresh", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"optim: {name} = {getattr(self, name)}; give {least} or more.")
        if not self.eps > 0:
            raise ValueError(f"optim: eps = {self.eps}; give a positive number.")
        if not self.weight_decay >= 0:
            raise ValueError(f"optim: weight_decay = {self.weight_decay}; give 0 (none) or a positive number.")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"optim: clip_norm = {self.clip_norm}; give a positive number, or None for no clipping.")
