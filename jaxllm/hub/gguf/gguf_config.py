"""GGUF metadata as the equivalent ``config.json``, for ``jaxllm.hub.families``.

Every entry of an architecture is read, known not to affect the forward pass, or legal at one value only; anything
else is an error that names it. The entries are those that llama.cpp's ``conversion/*.py`` write, their meaning and
defaults those of its ``src/models/*.cpp`` (https://github.com/ggml-org/llama.cpp).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxllm.config import closest
from jaxllm.hub.errors import HubError
from jaxllm.hub.gguf.gguf_file import Gguf

IGNORED_ENTRIES = frozenset({"pooling_type", "rope.scaling.finetuned", "tensor_data_layout"})
"""Entries of an architecture that do not affect its forward pass."""

ONLY: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (1, -1),
}
"""Entries of an architecture that are legal at these values only."""


@dataclass(frozen=True)
class GgufArchitecture:
    """One value of ``general.architecture``.

    Attributes:
        model_type: Hugging Face's name of it.
        model_class: class that a ``config.json`` names.
        more: further config fields of this architecture, computed from the entries and the common fields.
    """

    model_type: str
    model_class: str
    more: Callable[[MetadataEntries, dict[str, Any]], dict[str, Any]] = lambda entries, config: {"hidden_act": "silu"}


class MetadataEntries:
    """Metadata of one architecture; remembers which entries were read."""

    def __init__(self, model: Gguf):
        self.path, self.metadata, self.tensors = model.path, model.metadata, model.tensors
        self.arch = str(arch := model.metadata.get("general.architecture"))
        if self.arch not in ARCHITECTURES:
            known = f"{closest(self.arch, ARCHITECTURES)} Known: {', '.join(sorted(ARCHITECTURES))}."
            raise HubError(f"{self.path}: general.architecture is {arch!r}.{known}")
        if (what := model.metadata.get("general.type", "model")) != "model":
            raise HubError(f"{self.path} is of the type {what!r}, not a model.")
        self.read: set[str] = set()

    def refuse(self, name: str, why: str) -> HubError:
        """Raises HubError for an entry, with the reason."""
        return HubError(f"{self.path}: {self.arch}.{name} = {self.metadata.get(f'{self.arch}.{name}')!r}; {why}.")

    def get(self, name: str, default: Any = None) -> Any:
        """Value of an entry, or a default."""
        self.read.add(name)
        return self.metadata.get(f"{self.arch}.{name}", default)

    def integer(self, name: str, default: int | None = None, least: int = 1) -> int:
        """An integer; an array of one integer per layer is accepted if all are equal."""
        value = self.get(name, default)
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]
        if value is None:
            raise HubError(f"{self.path} lacks {self.arch}.{name}.")
        if type(value) is not int or value < least:
            raise self.refuse(name, f"it is one whole number of at least {least}, the same for every layer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number; a float32 comes back as the decimal fraction that it was rounded from."""
        value = self.get(name, default)
        if value is None:
            raise HubError(f"{self.path} lacks {self.arch}.{name}.")
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise self.refuse(name, "it is a finite number, not negative")
        return decimal(value)

    def check(self) -> None:
        """Refuses every entry that was not read and affects the forward pass."""
        for key in self.metadata:
            name = key.removeprefix(f"{self.arch}.")
            if name == key or name in self.read or name in IGNORED_ENTRIES:
                continue
            if name not in ONLY:
                raise self.refuse(name, "this entry is not understood, so this model cannot be loaded yet")
            if self.metadata[key] not in ONLY[name]:
                raise self.refuse(name, f"legal: {' or '.join(map(repr, ONLY[name]))}")


def decimal(value: float) -> float:
    """The shortest decimal fraction whose float32 is ``value``; ``value`` itself where it has more digits."""
    if not abs(value) <= float(np.finfo(np.float32).max):
        return float(value)
    short = np.float32(value)
    return float(str(short)) if float(short) == value else float(value)


def hf_config(model: Gguf) -> dict[str, Any]:
    """The equivalent ``config.json`` of a GGUF model.

    Raises:
        HubError: an unknown architecture (lists the known ones), or an entry that is missing, unsupported or at an
            illegal
            value: each by name.
    """
    entries = MetadataEntries(model)
    arch = ARCHITECTURES[entries.arch]
    heads, embed, layers = (entries.integer(n) for n in ("attention.head_count", "embedding_length", "block_count"))
    if f"blk.{layers - 1}.attn_norm.weight" not in model.tensors or f"blk.{layers}.attn_norm.weight" in model.tensors:
        raise entries.refuse("block_count", "the file's tensors are those of another number of blocks")
    if "token_embd.weight" not in model.tensors:
        raise HubError(f"{model.path} has no tensor token_embd.weight.")
    head_dim = entries.integer("attention.key_length", embed // heads)
    if entries.integer("attention.value_length", head_dim) != head_dim:
        raise entries.refuse("attention.value_length", f"it is that of the keys, {head_dim}")
    config: dict[str, Any] = {
        "architectures": [arch.model_class],
        "model_type": arch.model_type,
        "dtype": "float32",
        "head_dim": head_dim,
        "hidden_size": embed,
        "intermediate_size": entries.integer("feed_forward_length"),
        "max_position_embeddings": entries.integer("context_length"),
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": entries.integer("attention.head_count_kv", heads),
        "rms_norm_eps": entries.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope_parameters(entries, head_dim),
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "vocab_size": entries.integer("vocab_size", model.tensors["token_embd.weight"].shape[0]),
    }
    for name in ("bos", "eos", "padding"):
        # None if missing: the families in transformers have different defaults, some beyond the vocabulary.
        token = model.metadata.get(f"tokenizer.ggml.{name}_token_id")
        config[f"{name[:3]}_token_id"] = token if isinstance(token, int) else None
    if "blk.0.attn_q.bias" in model.tensors and arch.model_type != "qwen2":
        config["attention_bias"] = True
    if "blk.0.ffn_down.bias" in model.tensors:
        config["mlp_bias"] = True
    config |= arch.more(entries, config)
    entries.check()
    return config


def rope_parameters(entries: MetadataEntries, head_dim: int) -> dict[str, Any]:
    """Rotary embedding parameters, from entries and from tensors of factors."""
    rotary = entries.integer("rope.dimension_count", head_dim)
    if (theta := entries.number("rope.freq_base", 10000.0)) == 0:
        raise entries.refuse("rope.freq_base", "it is positive")
    rope: dict[str, Any] = {"rope_theta": theta}
    if rotary != head_dim and entries.arch != "phi3":
        raise entries.refuse("rope.dimension_count", f"in this architecture it is that of the keys, {head_dim}")
    if rotary != head_dim:
        rope["partial_rotary_factor"] = rotary / head_dim
    kind, factor = entries.get("rope.scaling.type", "linear"), entries.number("rope.scaling.factor", 0.0) or 1.0
    original = entries.integer("rope.scaling.original_context_length", entries.integer("context_length"))
    if "rope_freqs.weight" in entries.tensors:
        if factor != 1.0:
            raise entries.refuse("rope.scaling.factor", "legal beside rope_freqs.weight: 1")
        return rope | llama3_scaling(entries, theta, rotary)
    if "rope_factors_long.weight" in entries.tensors or kind == "longrope":
        lists = {f"{n}_factor": _factors(entries, f"rope_factors_{n}.weight", rotary) for n in ("long", "short")}
        lists = {name: [decimal(factor) for factor in values.tolist()] for name, values in lists.items()}
        more: dict[str, Any] = {"rope_type": "longrope", "original_max_position_embeddings": original}
        growth = max(1.0, entries.integer("context_length") / original)
        usual = math.sqrt(1 + math.log(growth) / math.log(max(2, original)))  # default of a missing entry
        if not math.isclose(attention := entries.number("rope.scaling.attn_factor", usual), usual, rel_tol=1e-6):
            more["attention_factor"] = attention
        return rope | lists | more
    if kind == "yarn":
        fast, slow = (entries.number(f"rope.scaling.yarn_beta_{n}", d) for n, d in (("fast", 32.0), ("slow", 1.0)))
        yarn = {"factor": factor, "original_max_position_embeddings": original, "beta_fast": fast, "beta_slow": slow}
        return rope | {"rope_type": "yarn"} | yarn
    if kind not in ("none", "linear"):
        raise entries.refuse("rope.scaling.type", "legal: none, linear, yarn, longrope")
    if kind == "linear" and factor != 1.0:
        return rope | {"rope_type": "linear", "factor": factor}
    return rope | {"rope_type": "default"}


def _factors(entries: MetadataEntries, name: str, rotary: int) -> np.ndarray:
    """A tensor with one factor per rotated pair, by which its wavelength is stretched."""
    if name not in entries.tensors:
        raise HubError(f"{entries.path} has no tensor {name}, which its rotary embedding asks for.")
    with np.errstate(invalid="ignore"):
        factors = np.asarray(entries.tensors[name], np.float64)
    if factors.shape != (rotary // 2,) or not (np.isfinite(factors) & (factors > 0)).all():
        raise HubError(f"{entries.path}: {name} is not {rotary // 2} positive factors.")
    return factors


def llama3_scaling(entries: MetadataEntries, theta: float, rotary: int) -> dict[str, Any]:
    """Parameters of Llama 3's frequency scaling, recovered from the factors in ``rope_freqs.weight``.

    Wavelengths from the original length up are stretched by the factor, those below a quarter of it are not, and
    between them 1 / stretch is linear in 1 / wavelength (``jaxllm.models.layers.rope``), so one stretch between gives
    the length. The low and high frequency factors are 1 and 4 as in every release; factors of another form are
    refused.
    """
    stretch = _factors(entries, "rope_freqs.weight", rotary)
    per_turn = theta ** (-np.arange(0, rotary, 2) / rotary) / (2 * math.pi)  # 1 / wavelength
    factor = float(stretch.max())
    between = (stretch > 1) & (stretch < factor)
    if between.any():
        smooth = (1 / stretch[between] - 1 / factor) / (1 - 1 / factor)
        with np.errstate(over="ignore"):
            original = np.median(np.rint((3 * smooth + 1) / per_turn[between]))
            expected = np.clip((original * per_turn - 1) / 3, 0, 1)
        if original < 2**31 and np.allclose(1 / stretch, (1 - expected) / factor + expected, rtol=1e-4):
            more = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
            more |= {"factor": decimal(factor), "original_max_position_embeddings": int(original)}
            return {"rope_type": "llama3"} | more
    raise HubError(
        f"{entries.path}: rope_freqs.weight is not Llama 3's scaling of frequencies (with low and high frequency "
        "factors 1 and 4), the only one that is understood."
    )


def gemma_fields(entries: MetadataEntries, config: dict[str, Any]) -> dict[str, Any]:
    """Fields that Gemma 2 and 3 share: soft caps and sliding-window layers."""
    second = config["model_type"] == "gemma2"
    heads, layers, embed = (config[n] for n in ("num_attention_heads", "num_hidden_layers", "hidden_size"))
    window = entries.integer("attention.sliding_window", None if second else 0, least=0)
    pattern = entries.get("attention.sliding_window_pattern", 2 if second else 6)
    if type(pattern) is int and pattern > 0:
        pattern = [(i + 1) % pattern != 0 for i in range(layers)]
    if not isinstance(pattern, list) or len(pattern) != layers:
        raise entries.refuse("attention.sliding_window_pattern", "it is a period or one bool a layer")
    local = [bool(window and slides) for slides in pattern]
    # The largest of each generation divides by the width of a head that would make up the stream, not of its heads.
    largest = layers == (46 if second else 62)
    fields = {
        "attn_logit_softcapping": entries.number("attn_logit_softcapping") if second else None,
        "final_logit_softcapping": entries.number("final_logit_softcapping", None if second else 0.0) or None,
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in local],
        "sliding_window": window or config["max_position_embeddings"],
        "query_pre_attn_scalar": embed // heads if largest else config["head_dim"],
    }
    if not second:
        sliding = {"rope_type": "default", "rope_theta": entries.number("rope.freq_base_swa", 10000.0)}
        fields["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": sliding}
    return fields


def phi3_fields(entries: MetadataEntries, config: dict[str, Any]) -> dict[str, Any]:
    """Fields of Phi 3: a sliding window for every layer (0: none), and the original length of its rotary factors."""
    return {
        "hidden_act": "silu",
        "original_max_position_embeddings": entries.integer(
            "rope.scaling.original_context_length", config["max_position_embeddings"]
        ),
        "rope_parameters": {"partial_rotary_factor": 1.0} | config["rope_parameters"],
        "sliding_window": entries.integer("attention.sliding_window", 0, least=0) or None,
    }


ARCHITECTURES = {
    "llama": GgufArchitecture("llama", "LlamaForCausalLM"),
    "qwen2": GgufArchitecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": GgufArchitecture("qwen3", "Qwen3ForCausalLM"),
    "gemma2": GgufArchitecture("gemma2", "Gemma2ForCausalLM", gemma_fields),
    "gemma3": GgufArchitecture("gemma3_text", "Gemma3ForCausalLM", gemma_fields),
    "phi3": GgufArchitecture("phi3", "Phi3ForCausalLM", phi3_fields),
}
"""Supported architectures."""
