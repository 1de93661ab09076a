"""Decoder in plain numpy, written from the papers, not from this package: one row, layer and head at a time.

Legend: S sequence, D embed, H head dim.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import numpy as np

from jaxllm.models import DecoderConfig, RopeConfig


def rms_norm(x: np.ndarray, gain: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * gain


def layer_norm(x: np.ndarray, gain: np.ndarray, bias: np.ndarray, eps: float) -> np.ndarray:
    return (x - x.mean(axis=-1, keepdims=True)) / np.sqrt(x.var(axis=-1, keepdims=True) + eps) * gain + bias


def norm(config: DecoderConfig, params: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    if config.norm == "layer":
        return layer_norm(x, params["gain"], params["bias"], config.norm_eps)
    return rms_norm(x, params["gain"] + (config.norm == "rms_plus_one"), config.norm_eps)


def rope(x: np.ndarray, positions: np.ndarray, config: RopeConfig) -> np.ndarray:
    """``x`` [S H]: the halves are real and imaginary parts of H/2 numbers, rotated by ``position * frequency``.

    Of a head that is rotated in part, its first dimensions are.
    """
    whole = int(x.shape[-1] * config.fraction)
    if whole < x.shape[-1]:
        first = rope(x[:, :whole], positions, RopeConfig(config.theta))
        return np.concatenate([first, x[:, whole:]], axis=-1)
    half = x.shape[-1] // 2
    frequency = np.array([config.theta ** (-i / half) for i in range(half)])
    turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * np.outer(positions, frequency))
    return np.concatenate([turned.real, turned.imag], axis=-1)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / np.sqrt(2)))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def attention(model: DecoderConfig, config: Any, params: dict[str, Any], x: np.ndarray, positions: Any) -> np.ndarray:
    """``x`` [S D], causal."""

    def projected(name: str, heads: int) -> np.ndarray:
        """[S heads H]"""
        y = np.stack([x @ params[name][:, n] for n in range(heads)], axis=1)
        y = y + params[f"{name}_bias"] if config.bias != "none" else y
        if name == "v" or config.qk_norm == "none":
            return y
        weights = params[f"{name}_norm"]
        if config.qk_norm == "head":
            return norm(model, weights, y)
        flat = {k: w.reshape(-1) for k, w in weights.items()}
        return norm(model, flat, y.reshape(len(x), -1)).reshape(y.shape)

    sizes = (("q", config.heads), ("k", config.kv_heads), ("v", config.kv_heads))
    most = np.inf if config.clip is None else config.clip
    queries, keys, values = (np.clip(projected(name, heads), -most, most) for name, heads in sizes)
    out = np.zeros_like(x)
    for n in range(config.heads):
        k = n * config.kv_heads // config.heads
        query, key, value = queries[:, n], keys[:, k], values[:, k]
        if config.rope is not None:
            query, key = rope(query, positions, config.rope), rope(key, positions, config.rope)
        for s in range(len(x)):
            first = 0 if config.window is None else max(0, s + 1 - config.window)
            scores = key[first : s + 1] @ query[s] * (config.scale or 1 / np.sqrt(config.head_dim))
            if config.softcap is not None:
                scores = config.softcap * np.tanh(scores / config.softcap)
            out[s] += (softmax(scores) @ value[first : s + 1]) @ params["o"][n]
    return out + params["o_bias"] if config.bias == "all" else out


def feed_forward(config: Any, params: dict[str, Any], x: np.ndarray) -> np.ndarray:
    """``x`` [S D]."""
    bias = lambda name: params[f"{name}_bias"] if config.bias else 0.0  # noqa: E731
    activation = {"silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh}[config.activation]
    up = x @ params["up"] + bias("up")
    inner = activation(x @ params["gate"] + bias("gate")) * up if config.gated else activation(up)
    return inner @ params["down"] + bias("down")


def layers(config: DecoderConfig, params: Any) -> list[Any]:
    """Each layer's parameters, in order."""
    found = []
    for s, (group, repeats) in enumerate(config.segments):
        for repeat in range(repeats):
            for b in range(len(group)):
                stacked = params["segments"][str(s)][str(b)]
                found.append({k: {n: _index(w, repeat) for n, w in part.items()} for k, part in stacked.items()})
    return found


def _index(weight: Any, repeat: int) -> Any:
    return {k: v[repeat] for k, v in weight.items()} if isinstance(weight, dict) else weight[repeat]


def logits(
    config: DecoderConfig,
    params: Any,
    tokens: np.ndarray,
    positions: np.ndarray | None = None,
    ladder: Collection[int] = (),
) -> np.ndarray:
    """Logits [S V] of one row of tokens; ``params`` as numpy arrays.

    Args:
        ladder: layers whose sublayers read the embedding and the outputs of all sublayers but the last one
            (arXiv:2501.06589, section 3), as far back as these layers go without a gap.
    """
    positions = np.arange(len(tokens)) if positions is None else positions
    x = params["embedding"]["table"][tokens] * config.embed_scale
    if config.learned_positions is not None:
        x = x + params["embedding"]["positions"][positions]
    outputs = [x]
    for n, (block, layer) in enumerate(zip(config.blocks, layers(config, params), strict=True)):
        # The first of such layers begins with a whole stream: its attention has no sublayer of theirs before it.
        late = n in ladder and n - 1 in ladder, n in ladder
        before = lambda name, y, b=block, w=layer: y if b.norms == "post" else norm(config, w[name], y)  # noqa: E731
        after = lambda name, y, b=block, w=layer: y if b.norms == "pre" else norm(config, w[name], y)  # noqa: E731
        x = np.sum(outputs[:-1] if late[0] else outputs, 0)
        attended = attention(config, block.attention, layer["attention"], before("attention_norm", x), positions)
        outputs.append(after("attention_out_norm", attended))
        x = np.sum(outputs[:-1] if late[1] else outputs, 0)
        outputs.append(after("mlp_out_norm", feed_forward(block.mlp, layer["mlp"], before("mlp_norm", x))))
    x = np.sum(outputs, 0)
    table = params["embedding"]["table"] if config.tied else params["head"]["weight"]
    out = norm(config, params["head"]["norm"], x) @ table.T
    return out if config.logit_softcap is None else config.logit_softcap * np.tanh(out / config.logit_softcap)
