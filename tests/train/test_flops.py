"""Model FLOPs: by hand, and by XLA's own count."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MlpConfig, Segments, functional
from jaxllm.models.remat import VALUES
from jaxllm.train.model_flops import (
    causal_mean,
    forward_flops_per_token,
    hardware_flops_per_token,
    train_flops_per_token,
)
from tests import environment, tiny
from tests.models.jaxprs import equations


def test_by_hand():
    """One block with every kind of matmul: D 8, 4 query and 2 kv heads of 6, F 10, V 20, attending to 7 tokens."""
    config = DecoderConfig(
        vocab_size=20, embed_dim=8, layers=1, pattern=(BlockConfig(AttentionConfig(4, 2, 6), MlpConfig(10)),)
    )
    q, k, v, o = 8 * 4 * 6, 8 * 2 * 6, 8 * 2 * 6, 4 * 6 * 8
    weights = q + k + v + o + 3 * 8 * 10 + 8 * 20
    attention = 4 * 6 * 7 + 4 * 6 * 7  # scores and values
    flops = functools.partial(forward_flops_per_token, attended=lambda window: 7)
    assert flops(config) == 2 * (weights + attention)
    assert train_flops_per_token(config, 13) == 3 * 2 * (weights + attention), "a row of 13: 7 tokens on average"
    two = dataclasses.replace(config, layers=2)
    assert flops(two) - flops(config) == 2 * (weights - 8 * 20 + attention)
    # Untying the head adds parameters and no product.
    assert flops(dataclasses.replace(config, tied=False)) == flops(config)


def test_six_flops_per_parameter_and_token_for_large_models():
    """The rule of thumb, for matmuls with weights."""
    config = tiny.decoder(
        embed_dim=256, heads=4, kv_heads=4, head_dim=64, mlp=1024, layers=8, vocab_size=512, dtype="float32"
    )
    params = sum(leaf.size for leaf in jax.tree.leaves(functional(config).abstract()))
    assert 3 * forward_flops_per_token(config, lambda window: 0) == pytest.approx(6 * params, rel=0.01)


@pytest.mark.parametrize(("seq_len", "window"), [(1, None), (13, None), (13, 1), (13, 5), (13, 13), (13, 40)])
def test_tokens_attended_to(seq_len, window):
    counts = [min(place, window or place) for place in range(1, seq_len + 1)]
    assert causal_mean(seq_len, window) == pytest.approx(sum(counts) / seq_len)


def test_windows_and_ungated_layers_cost_less():
    """A layer without a window, one with: 12 of 13 tokens' scores and values; one matmul in three less."""
    full = BlockConfig(AttentionConfig(4, 2, 6), MlpConfig(10))
    local = BlockConfig(AttentionConfig(4, 2, 6, window=2), MlpConfig(10, gated=False))
    one, two = (DecoderConfig(vocab_size=20, embed_dim=8, layers=1, pattern=(block,)) for block in (full, local))
    saved = 4 * 4 * 6 * (7 - causal_mean(13, 2)) + 2 * 8 * 10
    assert train_flops_per_token(one, 13) - train_flops_per_token(two, 13) == pytest.approx(3 * saved)


def test_xla_counts_the_same():
    """An unrolled forward of rows so short that attention's mask makes no difference, within a few per cent."""
    config = tiny.decoder(
        embed_dim=128, heads=4, kv_heads=2, head_dim=32, mlp=512, layers=2, vocab_size=1024, unroll=0, dtype="float32"
    )
    model = functional(config)
    rows, seq_len = 16, 4

    def logits(params: Any, tokens: Any) -> Any:
        hidden, _ = model.forward(params, tokens, tokens, Segments())
        return model.head(params, hidden)

    lowered = jax.jit(logits).lower(model.abstract(), jnp.zeros((rows, seq_len), jnp.int32))
    counted = lowered.compile(environment.AS_EVER).cost_analysis()["flops"]
    ours = (
        rows * seq_len * forward_flops_per_token(config, lambda window: seq_len)
    )  # the mask saves nothing: all pairs are computed
    # Norms, softmax and gates come on top and are not ours to count.
    assert 1.0 <= counted / ours < 1.04


def test_what_is_done_again_by_hand():
    """The block of ``test_by_hand``: all matmuls but the last of the MLP, and not the head's."""
    config = DecoderConfig(
        vocab_size=20, embed_dim=8, layers=2, pattern=(BlockConfig(AttentionConfig(4, 2, 6), MlpConfig(10)),)
    )
    model = train_flops_per_token(config, 13)
    for remat in ("none", "elementwise"):
        assert hardware_flops_per_token(dataclasses.replace(config, remat=remat), 13) == model
    again = (8 * 4 * 6 + 2 * 8 * 2 * 6 + 4 * 6 * 8) + 2 * 8 * 10 + 2 * 4 * 6 * 7
    assert hardware_flops_per_token(dataclasses.replace(config, remat="full"), 13) == model + 2 * 2 * again


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"moe": (4, 2, 32, True)},
        {"moe": (4, 2, 32, True, 24)},
        {"norms": "sandwich", "qk_norm": "all"},
        {"norms": "post", "gated": False, "clip": 0.5},
        {"latent": 24},
    ],
    ids=str,
)
def test_a_gradient_does_again_what_is_counted(kind):
    """Matmuls in the gradient of a scanned layer, with full recomputation, less those without any.

    A dense layer, a mixture, whose 4 x 2 x 2 rows fill their buffers, one with a shared expert; norms of queries, keys
    and outputs, and clipping, whose gradients read what a matmul computed; latent attention.
    """
    moe = kind.get("moe")
    embed, mlp, rows, seq_len = 64, 160, 4, 2
    config = tiny.decoder(
        dtype="float32", embed_dim=embed, heads=4, kv_heads=2, head_dim=16, mlp=mlp, layers=4, vocab_size=32, unroll=1,
        **{name: value for name, value in kind.items() if name != "clip"},
    )  # fmt: skip
    if clip := kind.get("clip"):
        (block,) = config.pattern
        attention = dataclasses.replace(block.attention, clip=clip)
        config = dataclasses.replace(config, pattern=(dataclasses.replace(block, attention=attention),))

    def counted(remat: str) -> int:
        model = functional(dataclasses.replace(config, remat=remat))
        tokens = jnp.zeros((rows, seq_len), jnp.int32)

        def total(params: Any) -> Any:
            return jnp.sum(model.forward(params, tokens, tokens, Segments())[0])

        flops = 0
        for equation in equations(jax.make_jaxpr(jax.grad(total))(model.abstract()).jaxpr):
            if equation.primitive.name == "dot_general":
                (contracted, _), _ = equation.params["dimension_numbers"]
                shape = equation.invars[0].aval.shape
                flops += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(shape[d] for d in contracted)
        return flops

    def ours(remat: str) -> float:
        """FLOPs of a layer and token, without the savings of attention's mask."""
        again = dataclasses.replace(config, remat=remat)
        added = hardware_flops_per_token(again, seq_len) - train_flops_per_token(again, seq_len)
        attended = 2 * config.pattern[0].attention.attention_macs * causal_mean(seq_len, None)
        attended *= 2 if remat == "sqrt" else 1
        return added / config.layers - attended + attended / causal_mean(seq_len, None) * seq_len

    named = [one.name for one in config.pattern[0].matmul_values(embed) if one.name in VALUES]
    inner = "inner" if "up" in named else "residual"  # a mixture alone has none
    for remat in ("attention", "full", "sqrt", f"save:{inner}", "save:v+q"):  # none of them keeps attention's
        assert counted(remat) - counted("none") == rows * seq_len * ours(remat)
    sets = ("attention", "attention+residual", f"{inner}+attention", "k+attention", "+".join(named))
    for policy in ("elementwise", *(f"save:{values}" for values in sets)):
        kept = dataclasses.replace(config, remat=policy)
        more = hardware_flops_per_token(kept, seq_len) - train_flops_per_token(kept, seq_len)
        assert counted(kept.remat) - counted("none") == rows * seq_len * more / config.layers
    for share in (0.0, 0.5, 1.0):  # of two tokens, one; and no attention
        kept = dataclasses.replace(config, remat=f"offload:{share}")
        more = hardware_flops_per_token(kept, seq_len) - train_flops_per_token(kept, seq_len)
        router = 0 if moe is None else share * 2 * embed * moe[0]  # kept like other products, and counted
        assert counted(kept.remat) - counted("none") == rows * seq_len * (more / config.layers - router)
