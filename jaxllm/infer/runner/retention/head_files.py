"""Files of retaining heads: safetensors with one array of all layers for each weight."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jaxllm.hub.safetensors import open_file, write_file
from jaxllm.models import DecoderConfig
from jaxllm.models.retaining_heads import RetainingHeads, input_dim


def save_heads(heads: RetainingHeads, path: Path) -> None:
    """Writes retaining heads to a safetensors file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, {name: np.asarray(x, np.float32) for name, x in vars(heads).items()})


def load_heads(path: Path, config: DecoderConfig) -> RetainingHeads:
    """Retaining heads of a model, as ``save_heads`` has written them.

    Raises:
        ValueError: the file is missing or not one of retaining heads, or they are for a model of other sizes.
    """
    names = tuple(RetainingHeads.__dataclass_fields__)
    try:
        found = open_file(path)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"retaining heads: {path} cannot be read: {error}. `jaxllm train locret_smollm2` writes such a file."
        ) from error
    if sorted(found) != sorted(names):
        raise ValueError(f"retaining heads: {path} has {sorted(found)}, not {sorted(names)}.")
    wide, kv = input_dim(config), config.blocks[0].attention.kv_spec.kv_heads
    hidden = found["up"].shape[-1]
    legal = {"up": (wide, hidden), "up_bias": (hidden,), "down": (hidden, kv), "down_bias": (kv,)}
    for name, shape in legal.items():
        if found[name].shape != (config.layers, *shape):
            raise ValueError(
                f"retaining heads: {name} in {path} is {list(found[name].shape)}, and this model needs "
                f"{[config.layers, *shape]}: train heads for it."
            )
    return RetainingHeads(**{name: jnp.asarray(found[name]) for name in names})
