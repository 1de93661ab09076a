"""Tiny published models with a module for multi-token prediction, and what transformers' layers make of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.masking_utils import create_causal_mask

from jaxllm.hub.safetensors import open_model, write_model
from tests.hub import peers

LAYERS = 3
FAMILIES = ("deepseek_v3", "glm4_moe")


def whole(family: str, seed: int) -> Any:
    """A model of transformers whose last layer is the module's block."""
    return peers.peer(family, seed, num_hidden_layers=LAYERS + 1, first_k_dense_replace=1).model


def module_tensors(width: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """The module's own tensors, by their names in its layer."""
    shapes = {"enorm": (width,), "hnorm": (width,), "eh_proj": (width, 2 * width), "shared_head.norm": (width,)}
    return {
        f"{name}.weight": (rng.normal(size=shape) * (0.3 if len(shape) > 1 else 0.2) + (len(shape) == 1)).astype(
            np.float32
        )
        for name, shape in shapes.items()
    }


def save(family: str, seed: int, directory: Path) -> tuple[Any, dict[str, np.ndarray]]:
    """Writes a model with its module; returns transformers' layers and the module's tensors."""
    model = whole(family, seed)
    before = peers.Peer(model, np.zeros(0)).save(directory.parent / f"{directory.name} of one more layer")
    own = module_tensors(model.config.hidden_size, np.random.default_rng(seed))
    tensors = {name: np.asarray(value) for name, value in open_model(before).items()}
    layer = f"model.layers.{LAYERS}."
    tensors |= {layer + name: value for name, value in own.items()}
    tensors[f"{layer}embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    config = json.loads((before / "config.json").read_text())
    config |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    write_model(directory, tensors, {"config.json": json.dumps(config)}, 2**30)
    return model, own


def drafted(model: Any, own: dict[str, np.ndarray], tokens: list[int], count: int) -> np.ndarray:
    """Logits of ``count`` drafted tokens after these, each the likeliest: Float64[count V], by transformers' layers."""
    with peers.float64(), torch.no_grad():
        wide = peers.Peer(model, np.zeros(0)).wide()
        ids = torch.tensor([tokens])
        states: list[Any] = []
        hook = wide.model.layers[LAYERS].register_forward_pre_hook(lambda _, given: states.append(given[0]))
        wide(ids, use_cache=False)
        hook.remove()
        features = wide.model.norm(states[0])[:, :-1]
        pairs, logits = tokens[1:], []
        weights = {name: torch.tensor(value, dtype=torch.double) for name, value in own.items()}
        for _ in range(count):
            embedded = wide.model.embed_tokens(torch.tensor([pairs]))
            both = torch.cat(
                [_normed(embedded, weights["enorm.weight"], model), _normed(features, weights["hnorm.weight"], model)],
                dim=-1,
            )
            x, positions = both @ weights["eh_proj.weight"].T, torch.arange(len(pairs))[None]
            mask = create_causal_mask(wide.config, x, None, past_key_values=None, position_ids=positions)
            rotation = wide.model.rotary_emb(x, position_ids=positions)
            made = wide.model.layers[LAYERS](
                x, attention_mask=mask, position_ids=positions, position_embeddings=rotation
            )
            made = _normed(made, weights["shared_head.norm.weight"], model)
            logits.append(wide.lm_head(made[:, -1])[0].numpy())
            features = torch.cat([features, made[:, -1:]], dim=1)
            pairs = [*pairs, int(np.argmax(logits[-1]))]
    return np.stack(logits)


def _normed(x: Any, gain: Any, model: Any) -> Any:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + model.config.rms_norm_eps) * gain
