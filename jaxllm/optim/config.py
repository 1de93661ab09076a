"""OptimConfig: the update rule of an optimizer, its hyperparameters and its learning-rate schedule."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, get_args

from jaxllm.config import ConfigError, closest
from jaxllm.optim.adam8bit import Moments
from jaxllm.optim.bfloat16_params import Rounding
from jaxllm.optim.optimizer_spec import OptimizerSpec
from jaxllm.optim.optimizer_table import OPTIMIZERS, kinds_where
from jaxllm.optim.schedules import ScheduleConfig

FORMER_DEFAULTS = {"refresh": 200}
"""Former defaults of fields, which configurations of older runs contain for every rule."""
OPTIONAL_FIELDS = ("b1", "b2", "eps", "rank", "refresh", "moments")
"""Fields that not every optimizer uses; the row of an optimizer names those that it uses."""


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer: update rule, hyperparameters and learning-rate schedule.

    Attributes:
        schedule: learning-rate schedule.
        kind: the rule, a name in ``jaxllm.optim.optimizer_table.OPTIMIZERS``; bytes are the optimizer state per
            parameter in float32.
            "adamw": 8 bytes (arXiv:1711.05101).
            "lion": 4 bytes; the sign of a momentum. Its paper uses a learning rate 3 to 10 times smaller, a weight
            decay larger by the same factor, and b1 = 0.95, b2 = 0.98 for language models (arXiv:2302.06675).
            "adan": 16 bytes; moments of the gradient, of its differences and of their Nesterov square, with the paper's
            decays (arXiv:2208.06677).
            "adafactor": 4 bytes for each row and column of a matrix instead of each element, no momentum
            (arXiv:1804.04235, without its learning-rate schedule).
            "muon": 4 bytes for matrices within layers, whose Nesterov momentum is orthogonalised and scaled to the size
            of AdamW's updates, so that it takes AdamW's learning rate; AdamW for other parameters (arXiv:2502.16982).
            "galore", "apollo", "apollo_mini": 8 bytes for each of rank * n elements of a matrix of m * n, m the
            smaller side, and for GaLore 4 more for each of rank * m; AdamW for embeddings and other parameters
            (``jaxllm.optim.low_rank``: arXiv:2403.03507, arXiv:2412.05270).
            "compact": 8 bytes for each of rank * outputs elements of a matrix within layers, whose gradients and inputs
            are kept as random projections; AdamW for other parameters (``jaxllm.optim.compact``: arXiv:2410.15352).
            "soap": 8 bytes, and 8 m^2 + 8 n^2 per matrix: Adam in the eigenbasis of Shampoo's preconditioner; AdamW
            for embeddings and other parameters (``jaxllm.optim.soap``: arXiv:2409.11321).
            "schedule_free": 8 bytes; AdamW whose parameters are an average of its iterates, which replaces a decaying
            learning rate (``jaxllm.optim.schedule_free``: arXiv:2405.15682).
            "sophia": 8 bytes; momentum over the Hessian's diagonal, clipped elementwise. The Gauss-Newton-Bartlett
            estimate uses labels sampled from the model: one more forward and backward pass every ``refresh`` steps.
            Its paper has b1 = 0.965, b2 = 0.99 (``jaxllm.optim.sophia``, ``jaxllm.train.step.sophia_hessian``:
            arXiv:2305.14342).
            "lomo": none; gradient descent that updates each layer in the backward pass, before the next gradient
            exists (``jaxllm.train.step.lomo``: arXiv:2306.09782).
            "adalomo": 4 bytes for each row and column of a matrix; the same with Adafactor's update times the
            parameter's root mean square (arXiv:2310.10195).
            "mezo": none; two forward passes and no backward pass, for fine-tuning (``jaxllm.train.step.mezo``:
            arXiv:2305.17333; ZO2, arXiv:2503.12668).
            "sgd": 4 bytes; momentum b1.
        moments: "float32", or "8bit": quantised in blocks of at most 256 with one scale each, 2 bytes and 8 per block
            instead of 8 bytes, for matrices within layers (``jaxllm.optim.adam8bit``: 8-bit Adam, arXiv:2110.02861;
            8-bit GaLore).
        b1, b2: decay of the first and second moment. Lion: of the update's momentum and the stored one. Muon: for
            parameters other than matrices; the momentum of matrices is always 0.95.
        eps: added to the root of the second moment; Adafactor: added to squared gradients.
        rank: of GaLore and APOLLO; 0 for a quarter of a matrix's smaller side. Of CompAct; 0 for a
            quarter of its inputs.
        refresh: steps between two projections (GaLore, APOLLO, CompAct), eigenbases (SOAP) or Hessian estimates
            (Sophia); 0 for 200, 10 and 10.
        weight_decay: decoupled weight decay of matrices and embeddings; gains and biases do not decay.
        rounding: of updates of parameters stored in bfloat16. "nearest": to the nearest value. The others store the
            optimizer state in bfloat16 too: "stochastic" rounds up or down at random, "collage" (AdamW, Lion, SGD)
            stores the sum of two bfloat16 values. See ``jaxllm.optim.bfloat16_params``.
        clip_norm: gradient clipping: gradients of a larger global norm are scaled down to it; None: no clipping.
    """

    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    kind: str = "adamw"
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
        if self.kind not in OPTIMIZERS:
            raise ConfigError(
                f"optim: kind = {self.kind!r}; legal: {', '.join(OPTIMIZERS)}.{closest(self.kind, OPTIMIZERS)}"
            )
        defaults: dict[str, Any] = {one.name: one.default for one in dataclasses.fields(self)}
        spec = self.spec
        for name in OPTIONAL_FIELDS:
            if name not in spec.fields and getattr(self, name) not in (defaults[name], FORMER_DEFAULTS.get(name)):
                raise ValueError(
                    f'optim: "{self.kind}" does not use {name}; it uses {", ".join(sorted(spec.fields)) or "none"}.'
                )
        if self.rounding == "collage" and not spec.collage:
            legal = kinds_where(lambda spec: spec.collage)
            raise ValueError(
                f'optim: rounding = "collage" supports {", ".join(legal)}; give "{self.kind}" rounding = "stochastic".'
            )
        if self.rounding != "nearest" and (spec.float32_state or self.moments != "float32"):
            said = f'kind = "{self.kind}"' if spec.float32_state else f'moments = "{self.moments}"'
            raise ValueError(f'optim: {said} does not support rounding = "{self.rounding}"; give "nearest".')
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
        if spec.layerwise and self.clip_norm is not None:
            raise ValueError(
                f'optim: "{self.kind}" never holds all gradients, so it cannot clip them by global norm; set clip_norm '
                "to None."
            )
        if spec.averaging and self.schedule.kind != "constant":
            raise ValueError(
                f'optim: "{self.kind}" replaces a decaying learning rate, but schedule.kind = '
                f'"{self.schedule.kind}"; give "constant".'
            )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"optim: clip_norm = {self.clip_norm}; give a positive number, or None for no clipping.")

    @property
    def spec(self) -> OptimizerSpec:
        """Row of the optimizer table."""
        return OPTIMIZERS[self.kind]

    @property
    def every(self) -> int:
        """Steps between two refreshes: ``refresh``, or the default of the optimizer's row."""
        return self.refresh or self.spec.refresh
