"""How large a model, how many tokens, which batch and learning rate: what a budget of arithmetic is best spent on.

Every law was fitted to some family of models, data and tokenizer; what carries over is the split of a budget, to
perhaps a factor of two, and not the loss.

Legend: N parameters, D tokens, C FLOP. All laws here count C = 6 N D, which leaves attention's scores out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxllm.data.repeated_data import worth
from jaxllm.models.decoder import BlockConfig, DecoderConfig
from jaxllm.models.layers.attention import AttentionConfig
from jaxllm.models.layers.mlp import MlpConfig

FLOPS = 6
"""FLOP of a parameter and token, forward and backward."""
HEAD = 128
WIDEST = 65_536
TIED_BELOW = 2e9
ASPECT = 100
"""Width of a layer over the number of layers; a model's loss hardly depends on it (arXiv:2001.08361, figure 5)."""


class ScalingError(ValueError):
    """A budget that no model can be made for; the message says why."""


@dataclass(frozen=True)
class Size:
    """A model and its training.

    Attributes:
        parameters: N.
        tokens: D.
        loss: that the law predicts, nats a token of its own data; None where it has no such term.
    """

    parameters: float
    tokens: float
    loss: float | None

    @property
    def flops(self) -> float:
        """C."""
        return FLOPS * self.parameters * self.tokens


@dataclass(frozen=True)
class Parametric:
    """``L(N, D) = floor + a / N**alpha + b / D**beta``, N counts all parameters (arXiv:2203.15556, section 3.3)."""

    source: str
    floor: float
    a: float
    b: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        """Nats a token."""
        return self.floor + self.a / parameters**self.alpha + self.b / tokens**self.beta

    def best(self, flops: float) -> Size:
        """The N and D of least loss with 6 N D = C: their equation 4."""
        ratio = (self.alpha * self.a / (self.beta * self.b)) ** (1 / (self.alpha + self.beta))
        parameters = ratio * (flops / FLOPS) ** (self.beta / (self.alpha + self.beta))
        tokens = flops / FLOPS / parameters
        return Size(parameters, tokens, self.loss(parameters, tokens))

    def fitting(self, tokens: float) -> float:
        """The N of the budget whose D that is."""
        ratio = (self.alpha * self.a / (self.beta * self.b)) ** (1 / (self.alpha + self.beta))
        spent = (ratio * tokens) ** ((self.alpha + self.beta) / self.alpha)
        return spent / tokens


@dataclass(frozen=True)
class Power:
    """``N = scale * C**exponent``, C in days of 1e15 FLOP/s, and N leaves embeddings out."""

    source: str
    scale: float
    exponent: float

    def best(self, flops: float) -> Size:
        """D is what 6 N D = C leaves."""
        parameters = self.scale * (flops / (1e15 * 86_400)) ** self.exponent
        return Size(parameters, flops / FLOPS / parameters, None)


LAWS: dict[str, Parametric | Power] = {
    "chinchilla": Parametric("arXiv:2404.10102, a refit of arXiv:2203.15556", 1.8172, 482.01, 2085.43, 0.3478, 0.3658),
    "hoffmann": Parametric("arXiv:2203.15556, as fitted there", 1.69, 406.4, 410.7, 0.34, 0.28),
    "kaplan": Power("arXiv:2001.08361, section 6.1", 1.3e9, 0.73),
}
"""The first agrees with that paper's other methods, and with 20 tokens a parameter. The third is superseded: its runs
kept a schedule of one length (arXiv:2203.15556, section 2)."""


def step_law(parameters: float, tokens: float) -> tuple[float, float]:
    """(peak learning rate, tokens of a batch) for AdamW: Step Law, arXiv:2503.04715, equation 1.

    Fitted between 60 M and 1 B parameters and 2 B and 100 B tokens; ``parameters`` leave the vocabulary's out.
    """
    return 1.79 * parameters**-0.713 * tokens**0.307, 0.58 * tokens**0.571


EXCESS = 5.309743
"""R*_N of arXiv:2305.16264: parameters beyond what the different tokens ask for are worth less and less, and sooner
than repeated tokens are."""


@dataclass(frozen=True)
class Repeated:
    """A model and its training on less data than there should be.

    Attributes:
        size: N, D and the loss that the law predicts for what they are worth.
        worth: fresh tokens that D is worth.
        lost: nats a token that the best split of the same budget would have less, were all tokens fresh.
    """

    size: Size
    worth: float
    lost: float


def repeated(law: Parametric, flops: float, unique: float) -> Repeated:
    """The N and D of least loss with 6 N D = C, where only so many tokens are different (arXiv:2305.16264, section 3).

    L(N', D') of the law, with D' of equation 5 and N' of equation 6: excess parameters are those beyond the ones that
    the law gives the different tokens, U_N. R*_D and R*_N are their fits, with exponents of their own data's law.
    """
    free = law.best(flops)
    if free.tokens <= unique:
        return Repeated(free, free.tokens, 0.0)
    asked = law.fitting(unique)

    def loss(log_n: float) -> float:
        n = math.exp(log_n)
        return law.loss(worth(n, asked, EXCESS), worth(flops / FLOPS / n, unique))

    # Falls and then rises: more parameters are worth less and less, and so are more tokens.
    low, high = math.log(free.parameters) - 12, math.log(flops / FLOPS / unique)
    golden = (math.sqrt(5) - 1) / 2
    while high - low > 1e-9:
        a, b = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, b) if loss(a) <= loss(b) else (a, high)
    found = loss(low)
    parameters = math.exp(low)
    tokens = flops / FLOPS / parameters
    assert free.loss is not None
    return Repeated(Size(parameters, tokens, found), worth(tokens, unique), found - free.loss)


def count(config: DecoderConfig) -> tuple[int, int]:
    """(all parameters, those without the vocabulary's) of a dense model that ``shape`` makes."""
    block = config.pattern[0]
    width, attention, mlp = config.embed_dim, block.attention, block.mlp
    assert isinstance(attention, AttentionConfig)
    assert isinstance(mlp, MlpConfig)
    heads = 2 * (attention.heads + attention.kv_heads) * attention.head_dim
    layer = width * (heads + 3 * mlp.hidden + 2)
    body = config.layers * layer + width
    return body + (1 if config.tied else 2) * config.vocab_size * width, body


def shape(parameters: float, vocab_size: int) -> DecoderConfig:
    """A Llama-like model of about so many parameters: heads of 128, an MLP of 8/3 of the width.

    Raises:
        ScalingError: the vocabulary alone has more.
    """
    tied = parameters < TIED_BELOW
    found: list[tuple[float, DecoderConfig]] = []
    for width in range(HEAD, WIDEST, HEAD):
        heads = width // HEAD
        kv_heads = 8 if heads > 8 and heads % 8 == 0 else heads
        hidden = -(-8 * width // 3 // 256) * 256
        block = BlockConfig(AttentionConfig(heads=heads, kv_heads=kv_heads, head_dim=HEAD), MlpConfig(hidden=hidden))
        one = DecoderConfig(vocab_size=vocab_size, embed_dim=width, layers=1, pattern=(block,), tied=tied)
        whole, body = count(one)
        layers = round((parameters - (whole - body) - width) / (body - width))
        if layers < 1:
            break
        made = DecoderConfig(vocab_size=vocab_size, embed_dim=width, layers=layers, pattern=(block,), tied=tied)
        wrong = abs(math.log(count(made)[0] / parameters)) + 0.1 * abs(math.log(width / layers / ASPECT))
        found.append((wrong, made))
    if not found:
        raise ScalingError(
            f"a model of {parameters:.3g} parameters is smaller than its vocabulary of {vocab_size} makes it; choose a "
            "smaller vocabulary or a larger budget."
        )
    return min(found, key=lambda pair: pair[0])[1]
