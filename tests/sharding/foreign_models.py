"""Models in plain JAX with parameter trees of their own: no logical axes, other names, layouts of other libraries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

D, H, K, F, V, S, L = 16, 4, 8, 32, 24, 6, 2


class Foreign(NamedTuple):
    """A model: its loss, its parameters, a batch, and the expected rules by the last word of the path."""

    loss: Callable[..., Any]
    params: Any
    batch: tuple[Any, ...]
    rules: dict[str, str]


def norm(x: Any, scale: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale


def attend(q: Any, k: Any, v: Any, *, causal: bool, bias: Any = 0.0) -> Any:
    """q, k, v [B S H K] -> [B S H K]."""
    scores = jnp.einsum("bqhk,bthk->bhqt", q, k) / np.sqrt(q.shape[-1]) + bias
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    return jnp.einsum("bhqt,bthk->bqhk", jax.nn.softmax(scores), v)


def heads(x: Any) -> Any:
    return x.reshape(*x.shape[:-1], H, -1)


def flat(x: Any) -> Any:
    return x.reshape(*x.shape[:-2], -1)


def nll(logits: Any, targets: Any) -> Any:
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1))


def turned(x: Any) -> Any:
    """Rotary positions, half of the features with the other half."""
    angles = jnp.arange(x.shape[1])[:, None, None] / 10.0 ** jnp.arange(x.shape[-1] // 2)
    one, other = jnp.split(x, 2, -1)
    return jnp.concatenate(
        [one * jnp.cos(angles) - other * jnp.sin(angles), one * jnp.sin(angles) + other * jnp.cos(angles)], -1
    )


def gptj(rng: np.random.Generator) -> Foreign:
    """GPT-J: attention and feed-forward layer beside each other, an output matrix with a bias."""

    def block(p: Any, x: Any) -> Any:
        h = norm(x, p["n"])
        a = attend(turned(heads(h @ p["q"])), turned(heads(h @ p["k"])), heads(h @ p["v"]), causal=True)
        return x + flat(a) @ p["o"] + jax.nn.gelu(h @ p["up"] + p["up_b"]) @ p["down"] + p["down_b"]

    def loss(params: Any, tokens: Any, targets: Any) -> Any:
        x = params["wte"][tokens]
        for one in params["h"]:
            x = block(one, x)
        return nll(norm(x, params["last"]) @ params["head"] + params["head_b"], targets)

    layer = {"q": (D, H * K), "k": (D, H * K), "v": (D, H * K), "o": (H * K, D), "n": (D,)}
    layer |= {"up": (D, F), "up_b": (F,), "down": (F, D), "down_b": (D,)}
    shapes = {"wte": (V, D), "h": [layer] * L, "last": (D,), "head": (D, V), "head_b": (V,)}
    rules = dict.fromkeys(("q", "k", "v", "up", "head"), "fan-out") | {"o": "fan-in", "down": "fan-in"}
    rules |= {"wte": "embedding", "n": "copied", "last": "copied", "up_b": "features", "head_b": "features"}
    return Foreign(loss, drawn(rng, shapes), tokens(rng), rules | {"down_b": "copied"})


def llama(rng: np.random.Generator) -> Foreign:
    """LLaMA: gated, layers stacked and scanned, matrices [outputs, inputs] as torch has them."""

    def block(x: Any, p: Any) -> Any:
        h = norm(x, p["n"])
        a = attend(turned(heads(h @ p["q"].T)), turned(heads(h @ p["k"].T)), heads(h @ p["v"].T), causal=True)
        x = x + flat(a) @ p["o"].T
        h = norm(x, p["m"])
        return x + (jax.nn.silu(h @ p["gate"].T) * (h @ p["up"].T)) @ p["down"].T, None

    def loss(params: Any, tokens: Any, targets: Any) -> Any:
        x, _ = jax.lax.scan(jax.checkpoint(block), jnp.take(params["embed"], tokens, axis=0), params["layers"])
        return nll(jnp.einsum("bsd,vd->bsv", norm(x, params["last"]), params["head"]), targets)

    layer = {"q": (H * K, D), "k": (H * K, D), "v": (H * K, D), "o": (D, H * K), "n": (D,), "m": (D,)}
    layer |= {"gate": (F, D), "up": (F, D), "down": (D, F)}
    shapes = {"embed": (V, D), "last": (D,), "head": (V, D)}
    shapes["layers"] = {name: (L, *shape) for name, shape in layer.items()}
    rules = dict.fromkeys(("q", "k", "v", "gate", "up", "head"), "fan-out") | {"o": "fan-in", "down": "fan-in"}
    return Foreign(loss, drawn(rng, shapes), tokens(rng), rules | {"embed": "embedding", "n": "copied", "m": "copied"})


def t5(rng: np.random.Generator) -> Foreign:
    """T5: an encoder, a decoder that attends to it, relative positions, square matrices."""

    def attention(p: Any, x: Any, seen: Any, bias: Any, *, causal: bool) -> Any:
        q, k, v = heads(x @ p["wq"]), heads(seen @ p["wk"]), heads(seen @ p["wv"])
        return flat(attend(q, k, v, causal=causal, bias=bias)) @ p["wo"]

    def loss(params: Any, source: Any, tokens: Any, targets: Any) -> Any:
        near = jnp.clip(jnp.arange(S)[:, None] - jnp.arange(S), 0, 3)
        bias = jnp.moveaxis(params["relative"][near], -1, 0)
        memory = params["shared"][source]
        for p in params["encoder"]:
            memory = memory + attention(p["self"], norm(memory, p["n"]), norm(memory, p["n"]), bias, causal=False)
            memory = memory + jax.nn.relu(norm(memory, p["m"]) @ p["wi"]) @ p["wf"]
        x = params["shared"][tokens]
        for p in params["decoder"]:
            x = x + attention(p["self"], norm(x, p["n"]), norm(x, p["n"]), bias, causal=True)
            x = x + attention(p["cross"], x, memory, 0.0, causal=False)
            x = x + jax.nn.relu(norm(x, p["m"]) @ p["wi"]) @ p["wf"]
        return nll(x @ params["shared"].T, targets)

    square = {"wq": (D, D), "wk": (D, D), "wv": (D, D), "wo": (D, D)}
    layer = {"self": square, "n": (D,), "m": (D,), "wi": (D, F), "wf": (F, D)}
    shapes = {"shared": (V, D), "relative": (4, H), "encoder": [layer] * L, "decoder": [layer | {"cross": square}] * L}
    rules = dict.fromkeys(("wq", "wk", "wv", "wi"), "fan-out") | {"wo": "fan-in", "wf": "fan-in"}
    batch = (rng.integers(0, V, (4, S)), *tokens(rng))
    return Foreign(loss, drawn(rng, shapes), batch, rules | {"shared": "embedding", "n": "copied", "m": "copied"})


def opt(rng: np.random.Generator) -> Foreign:
    """OPT: learned positions, biases, one matrix for queries, keys and values by head, as Flax's DenseGeneral."""

    def loss(params: Any, tokens: Any, targets: Any) -> Any:
        x = params["words"][tokens] + params["places"][:S]
        for p in params["blocks"]:
            h = norm(x, p["n"])
            q, k, v = (jnp.einsum("bsd,dhk->bshk", h, p[name]) + p[name + "_b"] for name in ("query", "key", "value"))
            x = x + jnp.einsum("bshk,hkd->bsd", attend(q, k, v, causal=True), p["out"]) + p["out_b"]
            x = x + jax.nn.relu(norm(x, p["m"]) @ p["fc1"] + p["fc1_b"]) @ p["fc2"] + p["fc2_b"]
        return nll(x @ params["words"].T, targets)

    layer = dict.fromkeys(("query", "key", "value"), (D, H, K)) | {"out": (H, K, D), "fc1": (D, F), "fc2": (F, D)}
    layer |= {name + "_b": (H, K) for name in ("query", "key", "value")}
    layer |= {"n": (D,), "m": (D,), "out_b": (D,), "fc1_b": (F,), "fc2_b": (D,)}
    shapes = {"words": (V, D), "places": (S + 2, D), "blocks": [layer] * L}
    rules = dict.fromkeys(("query", "key", "value", "fc1"), "fan-out") | {"out": "fan-in", "fc2": "fan-in"}
    rules |= {"words": "embedding", "fc1_b": "features", "out_b": "copied", "fc2_b": "copied", "places": "copied"}
    return Foreign(loss, drawn(rng, shapes), tokens(rng), rules)


FAMILIES = {"gptj": gptj, "llama": llama, "t5": t5, "opt": opt}


def drawn(rng: np.random.Generator, shapes: Any) -> Any:
    """Arrays of these shapes."""
    return jax.tree.map(
        lambda shape: rng.normal(size=shape) / np.sqrt(shape[0]), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )


def tokens(rng: np.random.Generator) -> tuple[Any, Any]:
    """Tokens and targets [4 S]."""
    return rng.integers(0, V, (4, S)), rng.integers(0, V, (4, S))
