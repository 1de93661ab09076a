"""PEFT files of virtual tokens: prefix and prompt tuning in ``adapter_config.json`` and ``adapter_model.safetensors``.

Both have one tensor, ``prompt_embeddings``: of a prompt ``[P, D]``; of a prefix ``[P, layers * 2 * kv heads * head
dim]``, the keys and then the values of each layer in turn.

Legend: P virtual tokens, D embed, R repeats of a stack of layers, K kv heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxllm.models import DecoderConfig, Functional
from jaxllm.peft.adapter import Adapter, AdapterError
from jaxllm.peft.methods.prefix import KEYS, VALUES

TENSOR = "prompt_embeddings"
PEFT_TYPES = {"prefix": "PREFIX_TUNING", "prompt": "PROMPT_TUNING"}
PROMPT_PATH = "embedding/prompt"
WITHOUT_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "encoder_hidden_size", "inference_mode", "init_weights", "num_layers",
    "num_attention_heads", "num_virtual_tokens", "peft_type", "peft_version", "prompt_tuning_init",
    "prompt_tuning_init_text", "prompt_tuning_init_state_dict_path", "revision", "runtime_config", "task_type",
    "tokenizer_name_or_path", "tokenizer_kwargs", "token_dim",
}  # fmt: skip
"""Fields of the configuration that say nothing which the tensor's shape does not, or only how it was trained."""


def kind_of(config: Mapping[str, Any]) -> str | None:
    """ "prefix" or "prompt" for a configuration of virtual tokens; None for another one."""
    return next((kind for kind, name in PEFT_TYPES.items() if config.get("peft_type") == name), None)


def modules_of(kind: str, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], model: Functional) -> Any:
    """Parameters by path, from the tensor of a file.

    Raises:
        AdapterError: a setting is not supported, or the tensor is not one for this model.
    """
    for name, value in config.items():
        legal = (1,) if name == "num_transformer_submodules" else (None, False, {}, [])
        if name not in WITHOUT_EFFECT and value not in legal:
            raise AdapterError(f"adapter_config.json: {name} = {value!r} is not supported with {config['peft_type']}.")
    if set(tensors) != {TENSOR}:
        raise AdapterError(
            f"adapter_model.safetensors has {', '.join(sorted(tensors))}; it should have {TENSOR} alone."
        )
    rows = tensors[TENSOR]
    width = model.config.embed_dim if kind == "prompt" else sum(size for *_, size in _layers(model.config))
    if rows.ndim != 2 or rows.shape != (config.get("num_virtual_tokens"), width):
        raise AdapterError(
            f"{TENSOR} is {list(rows.shape)}; this base and num_virtual_tokens need "
            f"[{config.get('num_virtual_tokens')}, {width}]. It is an adapter of another base."
        )
    if not np.isfinite(rows.astype(np.float32)).all():
        raise AdapterError(f"{TENSOR} holds values that are not finite; the file is damaged.")
    if kind == "prompt":
        return {PROMPT_PATH: rows}
    found: dict[str, np.ndarray] = {}
    begin = 0
    for path, row, (repeats, heads, dim), size in _layers(model.config):
        both = rows[:, begin : begin + size].reshape(len(rows), 2, heads, dim)
        for i, name in enumerate((KEYS, VALUES)):
            stack = found.setdefault(f"{path}/{name}", np.zeros((repeats, len(rows), heads, dim), rows.dtype))
            stack[row] = both[:, i]
        begin += size
    return found


def tensor_of(adapter: Adapter, model: Functional) -> Float[np.ndarray, "P width"]:
    """Inverse of ``modules_of``."""
    if adapter.kind == "prompt":
        return np.ascontiguousarray(adapter.modules[PROMPT_PATH])
    parts = []
    for path, row, _, _ in _layers(model.config):
        both = [np.asarray(adapter.modules[f"{path}/{name}"][row]) for name in (KEYS, VALUES)]
        parts.append(np.stack(both, axis=1).reshape(len(both[0]), -1))
    return np.concatenate(parts, axis=1)


def config_of(adapter: Adapter, model: Functional) -> dict[str, Any]:
    """Configuration as PEFT writes it."""
    tokens = next(iter(adapter.modules.values())).shape[-2 if adapter.kind == "prompt" else -3]
    blocks = model.config.blocks
    heads, dim = blocks[0].attention.kv_heads, blocks[0].attention.value_dim
    prefix = {"encoder_hidden_size": None, "prefix_projection": False}
    prompt = {"prompt_tuning_init": "RANDOM"}
    return {
        "peft_type": PEFT_TYPES[adapter.kind],
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base or None,
        "inference_mode": True,
        "num_virtual_tokens": tokens,
        "num_transformer_submodules": 1,
        "num_layers": len(blocks),
        "num_attention_heads": heads,
        "token_dim": heads * dim if adapter.kind == "prefix" else model.config.embed_dim,
        **(prefix if adapter.kind == "prefix" else prompt),
    }


def _layers(config: DecoderConfig) -> Iterator[tuple[str, int, tuple[int, int, int], int]]:
    """Path of each layer's attention, its row in the stack, (repeats, kv heads, head dim), elements of a token."""
    for s, (group, repeats) in enumerate(config.segments):
        for row in range(repeats):
            for b, block in enumerate(group):
                try:
                    block.attention.with_prefix(1)
                except ValueError as error:
                    raise AdapterError(f"{error}.") from error
                sizes = repeats, block.attention.kv_heads, block.attention.key_dim
                yield f"segments/{s}/{b}/attention", row, sizes, 2 * sizes[1] * sizes[2]
