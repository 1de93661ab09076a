"""Scaling laws (Chinchilla and others): model size, tokens, batch and learning rate for a compute budget.

Every law was fitted to one family of models, data and tokenizer; what transfers is the split of a budget, to perhaps a
factor of two, and not the loss.

Legend: N parameters, D tokens, C FLOPs. All laws here count C = 6 N D, which omits attention's scores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxllm.data.repeated_data import effective_data
from jaxllm.models.decoder import BlockConfig, DecoderConfig
from jaxllm.models.layers.attention import AttentionConfig
from jaxllm.models.layers.mlp import MlpConfig

FLOPS = 6
"""FLOPs per parameter and token, forward and backward."""
HEAD = 128
WIDEST = 65_536
TIED_BELOW = 2e9
ASPECT = 100
"""Aspect ratio, width over number of layers; a model's loss hardly depends on it (arXiv:2001.08361, figure 5)."""


class ScalingError(ValueError):
    """Budget that no model fits; the message says why."""


@dataclass(frozen=True)
class ModelSize:
    """Model size and its training tokens.

    Attributes:
        parameters: N.
        tokens: D.
        loss: predicted loss, nats per token of the law's data; None where the law has no such term.
    """

    parameters: float
    tokens: float
    loss: float | None

    @property
    def flops(self) -> float:
        """Compute budget C."""
        return FLOPS * self.parameters * self.tokens


@dataclass(frozen=True)
class ParametricLaw:
    """Parametric law ``L(N, D) = floor + a / N**alpha + b / D**beta``; N counts all parameters (arXiv:2203.15556,
    section 3.3).
    """

    source: str
    floor: float
    a: float
    b: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        """Predicted loss, nats per token."""
        return self.floor + self.a / parameters**self.alpha + self.b / tokens**self.beta

    def best(self, flops: float) -> ModelSize:
        """Compute-optimal N and D, of least loss with 6 N D = C (equation 4)."""
        ratio = (self.alpha * self.a / (self.beta * self.b)) ** (1 / (self.alpha + self.beta))
        parameters = ratio * (flops / FLOPS) ** (self.beta / (self.alpha + self.beta))
        tokens = flops / FLOPS / parameters
        return ModelSize(parameters, tokens, self.loss(parameters, tokens))

    def fitting(self, tokens: float) -> float:
        """Compute-optimal N for D = ``tokens``."""
        ratio = (self.alpha * self.a / (self.beta * self.b)) ** (1 / (self.alpha + self.beta))
        spent = (ratio * tokens) ** ((self.alpha + self.beta) / self.alpha)
        return spent / tokens


@dataclass(frozen=True)
class PowerLaw:
    """Power law ``N = scale * C**exponent``, C in days of 1e15 FLOP/s, N without embeddings."""

    source: str
    scale: float
    exponent: float

    def best(self, flops: float) -> ModelSize:
        """Compute-optimal N by the law, and D from 6 N D = C."""
        parameters = self.scale * (flops / (1e15 * 86_400)) ** self.exponent
        return ModelSize(parameters, flops / FLOPS / parameters, None)


LAWS: dict[str, ParametricLaw | PowerLaw] = {
    "chinchilla": ParametricLaw(
        "arXiv:2404.10102, a refit of arXiv:2203.15556", 1.8172, 482.01, 2085.43, 0.3478, 0.3658
    ),
    "hoffmann": ParametricLaw("arXiv:2203.15556, as fitted there", 1.69, 406.4, 410.7, 0.34, 0.28),
    "kaplan": PowerLaw("arXiv:2001.08361, section 6.1", 1.3e9, 0.73),
}
"""Scaling laws by name. The first agrees with that paper's other methods, and with 20 tokens per parameter. The third
is superseded: its runs used a schedule of one length (arXiv:2203.15556, section 2).
"""


def step_law(parameters: float, tokens: float) -> tuple[float, float]:
    """Step Law: (peak learning rate, tokens of a batch) for AdamW (arXiv:2503.04715, equation 1).

    Fitted between 60 M and 1 B parameters and 2 B and 100 B tokens; ``parameters`` exclude the embeddings.
    """
    return 1.79 * parameters**-0.713 * tokens**0.307, 0.58 * tokens**0.571


EXCESS = 5.309743
"""R*_N of arXiv:2305.16264: parameters beyond those optimal for the unique tokens have diminishing value, and sooner
than repeated tokens have.
"""


@dataclass(frozen=True)
class RepeatedDataPlan:
    """Model size and tokens for training on repeated data.

    Attributes:
        size: N, D and the loss predicted for their effective values.
        worth: effective number of fresh tokens in D.
        lost: nats per token that the compute-optimal split would have less, were all tokens fresh.
    """

    size: ModelSize
    worth: float
    lost: float


def plan_repeated_data(law: ParametricLaw, flops: float, unique: float) -> RepeatedDataPlan:
    """N and D of least loss with 6 N D = C, where only ``unique`` tokens are different (arXiv:2305.16264, section 3).

    L(N', D') of the law, with D' of equation 5 and N' of equation 6: excess parameters are those beyond U_N, the
    number that is optimal for the unique tokens. R*_D and R*_N are the paper's fits, with exponents of its own data's
    law.
    """
    free = law.best(flops)
    if free.tokens <= unique:
        return RepeatedDataPlan(free, free.tokens, 0.0)
    asked = law.fitting(unique)

    def loss(log_n: float) -> float:
        n = math.exp(log_n)
        return law.loss(effective_data(n, asked, EXCESS), effective_data(flops / FLOPS / n, unique))

    # Golden-section search: the loss falls and then rises, because both effective values saturate.
    low, high = math.log(free.parameters) - 12, math.log(flops / FLOPS / unique)
    golden = (math.sqrt(5) - 1) / 2
    while high - low > 1e-9:
        a, b = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, b) if loss(a) <= loss(b) else (a, high)
    found = loss(low)
    parameters = math.exp(low)
    tokens = flops / FLOPS / parameters
    assert free.loss is not None
    return RepeatedDataPlan(ModelSize(parameters, tokens, found), effective_data(tokens, unique), found - free.loss)


def count_parameters(config: DecoderConfig) -> tuple[int, int]:
    """(all parameters, those without the embeddings) of a dense model made by ``model_of_size``."""
    block = config.pattern[0]
    width = config.embed_dim
    layer = block.attention.weight_macs(width) + block.mlp.weight_macs(width) + 2 * width
    body = config.layers * layer + width
    return body + (1 if config.tied else 2) * config.vocab_size * width, body


def model_of_size(parameters: float, vocab_size: int) -> DecoderConfig:
    """Llama-like model of about that many parameters: heads of 128, an MLP of 8/3 of the width.

    Raises:
        ScalingError: the embeddings alone have more.
    """
    tied = parameters < TIED_BELOW
    found: list[tuple[float, DecoderConfig]] = []
    for width in range(HEAD, WIDEST, HEAD):
        heads = width // HEAD
        kv_heads = 8 if heads > 8 and heads % 8 == 0 else heads
        hidden = -(-8 * width // 3 // 256) * 256
        block = BlockConfig(AttentionConfig(heads=heads, kv_heads=kv_heads, head_dim=HEAD), MlpConfig(hidden=hidden))
        one = DecoderConfig(vocab_size=vocab_size, embed_dim=width, layers=1, pattern=(block,), tied=tied)
        whole, body = count_parameters(one)
        layers = round((parameters - (whole - body) - width) / (body - width))
        if layers < 1:
            break
        made = DecoderConfig(vocab_size=vocab_size, embed_dim=width, layers=layers, pattern=(block,), tied=tied)
        wrong = abs(math.log(count_parameters(made)[0] / parameters)) + 0.1 * abs(math.log(width / layers / ASPECT))
        found.append((wrong, made))
    if not found:
        raise ScalingError(
            f"{parameters:.3g} parameters are fewer than the embeddings of a vocabulary of {vocab_size} take; choose a "
            "smaller vocabulary or a larger budget."
        )
    return min(found, key=lambda pair: pair[0])[1]
