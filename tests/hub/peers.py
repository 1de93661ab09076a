"""Tiny random models made and run by transformers, the reference for Hugging Face files.

transformers works in float32 in places whatever its weights are; inside ``float64`` its own code runs in float64
throughout, so that it can be compared to nine digits.
"""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    import transformers
    from torch.overrides import TorchFunctionMode

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
torch.set_num_threads(1)

LENGTH = 24
"""Tokens of a reference text."""
SHORT = 14
"""Tokens within the original length of every rotary scaling drawn here."""

COMMON = {"vocab_size": 40, "num_hidden_layers": 3, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


class _Float64(TorchFunctionMode):
    """Turns every request for float32 into one for float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        wider = lambda x: torch.float64 if x is torch.float32 else x  # noqa: E731
        return func(*map(wider, args), **{k: wider(v) for k, v in (kwargs or {}).items()})


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """transformers' code in float64, models made inside included."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Float64():
            yield
    finally:
        torch.set_default_dtype(before)


def _sizes(rng: np.random.Generator, head_dim: bool = True) -> dict[str, Any]:
    heads, kv_heads = [(2, 1), (4, 2), (3, 3), (6, 2)][rng.integers(4)]
    head = int(rng.choice([4, 8]))
    sizes = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": int(heads * (head if not head_dim else rng.choice([2, 4]))),
        "intermediate_size": int(rng.integers(9, 20)),
        "tie_word_embeddings": bool(rng.integers(2)),
        "max_position_embeddings": 128,
    }
    return sizes | ({"head_dim": head} if head_dim else {})


def _rope(rng: np.random.Generator, *kinds: str) -> dict[str, Any]:
    """Parameters of a rotary embedding whose scaling is felt within LENGTH."""
    kind, theta = str(rng.choice(kinds)), float(rng.choice([100.0, 10000.0]))
    base = {"rope_type": kind, "rope_theta": theta}
    magnitudes = {"attention_factor": 1.3}, {"mscale": 0.7, "mscale_all_dim": 1.1}
    yarns = [{}, {"truncate": False, "beta_fast": 8.0}, *magnitudes]
    original = {"original_max_position_embeddings": 16}
    return (
        base
        | {
            "default": {},
            "linear": {"factor": 3.0},
            "dynamic": {"factor": 2.0},
            "llama3": original | {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            "yarn": original | {"factor": 4.0} | yarns[rng.integers(4)],
        }[kind]
    )


def _ropes(rng: np.random.Generator) -> dict[str, Any]:
    rope = _rope(rng, "default", "linear", "dynamic", "llama3", "yarn")
    return {"rope_parameters": rope} | ({"max_position_embeddings": 16} if rope["rope_type"] == "dynamic" else {})


def _kinds(rng: np.random.Generator, layers: int) -> list[str]:
    return [["full_attention", "sliding_attention"][i] for i in rng.integers(2, size=layers)]


def _llama(rng: np.random.Generator) -> Any:
    bias = {"attention_bias": bool(rng.integers(2)), "mlp_bias": bool(rng.integers(2))}
    return transformers.LlamaConfig(**COMMON | _sizes(rng) | _ropes(rng) | bias)


def _smollm2(rng: np.random.Generator) -> Any:
    more = {"tie_word_embeddings": True, "rope_interleaved": False, "is_llama_config": True}
    rope = {"rope_parameters": _rope(rng, "default")}
    return transformers.LlamaConfig(**COMMON | _sizes(rng, head_dim=False) | rope | more)


def _mistral(rng: np.random.Generator) -> Any:
    window = [None, 1, 5, 40][rng.integers(4)]
    return transformers.MistralConfig(**COMMON | _sizes(rng) | _ropes(rng), sliding_window=window)


def _qwen2(rng: np.random.Generator) -> Any:
    return transformers.Qwen2Config(**COMMON | _sizes(rng, head_dim=False) | _ropes(rng) | _some_windows(rng))


def _qwen3(rng: np.random.Generator) -> Any:
    more = _some_windows(rng) | {"attention_bias": bool(rng.integers(2))}
    return transformers.Qwen3Config(**COMMON | _sizes(rng) | _ropes(rng) | more)


def _some_windows(rng: np.random.Generator) -> dict[str, Any]:
    if rng.integers(2):
        return {"use_sliding_window": False, "sliding_window": 4}
    window = {"use_sliding_window": True, "sliding_window": int(rng.integers(1, 9))}
    return window | [{"max_window_layers": 1}, {"layer_types": _kinds(rng, 3)}][rng.integers(2)]


def _gemma2(rng: np.random.Generator) -> Any:
    more = {
        "sliding_window": int(rng.integers(1, 9)),
        "query_pre_attn_scalar": int(rng.integers(4, 20)),
        "attn_logit_softcapping": [None, 2.0][rng.integers(2)],
        "final_logit_softcapping": [None, 3.0][rng.integers(2)],
        "num_hidden_layers": int(rng.integers(1, 5)),
        "rope_parameters": _rope(rng, "default"),
    }
    return transformers.Gemma2Config(**COMMON | _sizes(rng) | more)


def _gemma3(rng: np.random.Generator) -> Any:
    ropes = {"full_attention": _rope(rng, "default", "linear"), "sliding_attention": _rope(rng, "default")}
    more = {
        "sliding_window": int(rng.integers(1, 9)),
        "query_pre_attn_scalar": int(rng.integers(4, 20)),
        "final_logit_softcapping": [None, 3.0][rng.integers(2)],
        "rope_parameters": ropes,
    }
    layers = int(rng.integers(1, 9))
    pattern = [{"layer_types": _kinds(rng, layers)}, {}, {"sliding_window_pattern": 2}][rng.integers(3)]
    return transformers.Gemma3TextConfig(**COMMON | _sizes(rng) | more | pattern | {"num_hidden_layers": layers})


def _phi3(rng: np.random.Generator) -> Any:
    sizes = _sizes(rng, head_dim=False)
    head = sizes["hidden_size"] // sizes["num_attention_heads"]
    partial = float(rng.choice([0.5, 1.0]))
    rope = _rope(rng, "default") | {"partial_rotary_factor": partial}
    more: dict[str, Any] = {"sliding_window": [None, 5][rng.integers(2)]}
    if rng.integers(2):
        pairs = int(head * partial) // 2
        factors = {f"{name}_factor": rng.uniform(1, 4, pairs).tolist() for name in ("short", "long")}
        rope |= {"rope_type": "longrope"} | factors
        more |= {"original_max_position_embeddings": 16, "max_position_embeddings": 64}
    return transformers.Phi3Config(**COMMON | sizes | {"rope_parameters": rope} | more)


def _olmo2(rng: np.random.Generator) -> Any:
    return transformers.Olmo2Config(**COMMON | _sizes(rng, head_dim=False) | _ropes(rng))


def _gpt2(rng: np.random.Generator) -> Any:
    heads = int(rng.choice([1, 2, 3]))
    return transformers.GPT2Config(
        vocab_size=40,
        n_layer=3,
        n_head=heads,
        n_embd=heads * int(rng.choice([3, 4])),
        n_positions=32,
        n_inner=[None, 11][rng.integers(2)],
        activation_function=str(rng.choice(["gelu_new", "gelu"])),
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=bool(rng.integers(4)),
    )


def _experts(rng: np.random.Generator, name: str = "num_experts", experts: int | None = None) -> dict[str, Any]:
    """Several experts, of which a token goes to some."""
    experts = experts or int(rng.integers(2, 7))
    return {name: experts, "num_experts_per_tok": int(rng.integers(1, experts + 1))}


def _mixtral(rng: np.random.Generator) -> Any:
    window = [None, 5][rng.integers(2)]
    more = _experts(rng, "num_local_experts")
    return transformers.MixtralConfig(**COMMON | _sizes(rng) | _ropes(rng) | more, sliding_window=window)


def _qwen3_moe(rng: np.random.Generator) -> Any:
    more = _experts(rng) | {"norm_topk_prob": bool(rng.integers(2)), "moe_intermediate_size": int(rng.integers(3, 9))}
    more |= {"attention_bias": bool(rng.integers(2))}
    more |= [{}, {"mlp_only_layers": [int(rng.integers(3))]}, {"decoder_sparse_step": 2}][rng.integers(3)]
    more |= [{}, {"use_sliding_window": True, "sliding_window": int(rng.integers(1, 9))}][rng.integers(2)]
    return transformers.Qwen3MoeConfig(**COMMON | _sizes(rng) | _ropes(rng) | more)


def _olmoe(rng: np.random.Generator) -> Any:
    more = _experts(rng) | {"norm_topk_prob": bool(rng.integers(2)), "attention_bias": bool(rng.integers(2))}
    sizes = _sizes(rng, head_dim=False) | _ropes(rng) | {"clip_qkv": [None, 0.5][rng.integers(2)]}
    return transformers.OlmoeConfig(**COMMON | sizes | more)


def _latent(rng: np.random.Generator) -> dict[str, Any]:
    """Sizes of latent attention, experts in groups, and YaRN with both of its magnitudes."""
    heads, groups = int(rng.choice([1, 2, 3])), int(rng.integers(1, 4))
    each, top = int(rng.integers(2, 4)), int(rng.integers(1, groups + 1))
    rope = _rope(rng, "default", "yarn")
    if rope["rope_type"] == "yarn" and rng.integers(2):
        rope |= {"mscale_all_dim": 0.9}
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "hidden_size": heads * int(rng.choice([6, 8])),
        "intermediate_size": int(rng.integers(9, 20)),
        "moe_intermediate_size": int(rng.integers(3, 9)),
        # Even, for transformers' DeepSeek-V2 takes views of complex numbers.
        "kv_lora_rank": int(rng.choice([4, 6, 8])),
        "q_lora_rank": [None, int(rng.integers(4, 9))][rng.integers(2)],
        "qk_nope_head_dim": int(rng.choice([4, 6, 8])),
        "qk_rope_head_dim": int(rng.choice([4, 6])),
        "v_head_dim": int(rng.integers(3, 9)),
        "n_shared_experts": int(rng.integers(1, 3)),
        "n_routed_experts": groups * each,
        "num_experts_per_tok": int(rng.integers(1, top * each + 1)),
        "n_group": groups,
        "topk_group": top,
        "first_k_dense_replace": int(rng.integers(0, 3)),
        "routed_scaling_factor": float(rng.choice([1.0, 2.5])),
        "attention_bias": bool(rng.integers(2)),
        "tie_word_embeddings": bool(rng.integers(2)),
        "max_position_embeddings": 128,
        "rope_parameters": rope,
    }


def _deepseek_v2(rng: np.random.Generator) -> Any:
    more = {"topk_method": ["greedy", "group_limited_greedy"][rng.integers(2)]}
    return transformers.DeepseekV2Config(**COMMON | _latent(rng) | more)


def _deepseek_v3(rng: np.random.Generator) -> Any:
    more = {"norm_topk_prob": bool(rng.integers(2)), "rope_interleave": bool(rng.integers(2))}
    return transformers.DeepseekV3Config(**COMMON | _latent(rng) | more)


def _glm4_moe(rng: np.random.Generator) -> Any:
    sizes, latent = _sizes(rng), _latent(rng)
    names = ("n_group", "topk_group", "n_routed_experts", "num_experts_per_tok", "n_shared_experts")
    more = {name: latent[name] for name in (*names, "first_k_dense_replace", "routed_scaling_factor")}
    more |= {"moe_intermediate_size": int(rng.integers(3, 9)), "norm_topk_prob": bool(rng.integers(2))}
    more |= {"use_qk_norm": bool(rng.integers(2)), "attention_bias": bool(rng.integers(2))}
    rope = _rope(rng, "default") | {"partial_rotary_factor": float(rng.choice([0.5, 1.0]))}
    return transformers.Glm4MoeConfig(**COMMON | sizes | more | {"rope_parameters": rope})


def _gpt_oss(rng: np.random.Generator) -> Any:
    more = _experts(rng, "num_local_experts") | {"sliding_window": int(rng.integers(1, 9))}
    more |= [{}, {"layer_types": _kinds(rng, 3)}][rng.integers(2)]
    more |= {"swiglu_limit": float(rng.choice([0.5, 7.0])), "attention_bias": bool(rng.integers(2))}
    return transformers.GptOssConfig(**COMMON | _sizes(rng) | {"rope_parameters": _rope(rng, "default", "yarn")} | more)


FAMILIES = {
    "llama": _llama,
    "smollm2": _smollm2,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "gpt2": _gpt2,
}
"""Family -> a random configuration of it."""

MIXTURES = {
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "olmoe": _olmoe,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
}
"""Those with experts."""


@dataclass(frozen=True)
class Peer:
    """Model of transformers and its outputs for a text.

    Attributes:
        model: the torch module, in float32.
        tokens: Int[2 LENGTH].
    """

    model: Any
    tokens: np.ndarray

    @property
    def config(self) -> dict[str, Any]:
        """Contents of its config.json."""
        return self.model.config.to_dict()

    def save(self, directory: Path) -> Path:
        """Writes config.json and model.safetensors."""
        self.model.save_pretrained(directory)
        (directory / "generation_config.json").unlink(missing_ok=True)
        return directory

    def logits(self, tokens: np.ndarray | None = None) -> np.ndarray:
        """Float32[B S V]."""
        return logits_of(self.model, self.tokens if tokens is None else tokens)

    def wide(self) -> Any:
        """The same model with float64 everywhere; use it inside ``float64()``."""
        model = type(self.model)(self.model.config).eval()
        model.load_state_dict({n: t.to(torch.double) for n, t in self.model.state_dict().items()})
        return model


def opened(directory: Path) -> Any:
    """Model that transformers loads from a directory."""
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(directory, **plain).eval()


def logits_of(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Float[B S V] of a torch model."""
    with torch.no_grad():
        return model(torch.from_numpy(tokens.astype(np.int64)), use_cache=False).logits.numpy()


def safetensors_of(file: Path) -> dict[str, np.ndarray]:
    """A file's tensors as the safetensors library reads them."""
    import safetensors.numpy

    return safetensors.numpy.load_file(file)


def gradients_of(model: Any, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Gradients of the mean negative log-likelihood of each next token, by the names under which weights are saved."""
    ids = torch.from_numpy(tokens.astype(np.int64))
    logits = model(ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    gradients = type(model)(model.config)
    for parameter, own in zip(gradients.parameters(), model.parameters(), strict=True):
        parameter.data = torch.zeros_like(own) if own.grad is None else own.grad
    for buffer in gradients.buffers():
        buffer.zero_()
    with tempfile.TemporaryDirectory() as folder:
        gradients.save_pretrained(folder)
        return safetensors_of(Path(folder) / "model.safetensors")


def routers(model: Any) -> list[Any]:
    """A model's routers, layer by layer; none where it has no experts."""
    return [
        module for _, module in model.named_modules() if type(module).__name__.endswith(("TopKRouter", "TopkRouter"))
    ]


@dataclass(frozen=True)
class Chosen:
    """Experts that the routers of a model chose for a text.

    Attributes:
        experts: of each layer with experts, Int[B S A], by number.
        margin: between the worth of the last expert (or group) chosen and of the first that was not, at the least.
    """

    experts: list[np.ndarray]
    margin: float


def chosen_of(model: Any, tokens: np.ndarray) -> Chosen:
    """Runs the model and listens to its routers."""
    heard: list[tuple[Any, Any]] = []
    hooks = [r.register_forward_hook(lambda r, _, out: heard.append((r, out))) for r in routers(model)]
    logits_of(model, tokens)
    for hook in hooks:
        hook.remove()
    margins = [_margin(router, out[0].detach().double().numpy()) for router, out in heard]
    chosen = [np.sort(out[2].numpy(), axis=-1).reshape(*tokens.shape, -1) for _, out in heard]
    return Chosen(chosen, min(margins, default=np.inf))


def _margin(router: Any, logits: np.ndarray) -> float:
    bias = getattr(router, "e_score_correction_bias", None)
    groups = getattr(router, "num_group", None) or 1
    greedy = getattr(router, "topk_method", None) == "greedy"
    worth = logits if bias is None else 1 / (1 + np.exp(-logits)) + bias.double().numpy()
    if groups == 1 or greedy:
        return _gap(np.sort(worth, axis=-1), router.top_k)
    grouped = np.sort(worth.reshape(*worth.shape[:-1], groups, -1), axis=-1)
    # By the best of a group the order is that of logits as it is of their softmax.
    best = grouped[..., -1] if bias is None else grouped[..., -2:].sum(-1)
    margin = _gap(np.sort(best, axis=-1), router.topk_group)
    order = np.argsort(-best, axis=-1)[..., : router.topk_group, None]
    kept = np.take_along_axis(grouped, order, axis=-2).reshape(*worth.shape[:-1], -1)
    return min(margin, _gap(np.sort(kept, axis=-1), router.top_k))


def _gap(ranked: np.ndarray, count: int) -> float:
    """Between number ``count`` from the end and the one before it."""
    if count == ranked.shape[-1]:
        return np.inf
    return float((ranked[..., -count] - ranked[..., -count - 1]).min())


def peer(family: str, seed: int, **fields: Any) -> Peer:
    """A random model of a family; the same for the same seed. ``fields``: of its configuration."""
    rng = np.random.default_rng([seed, *family.encode()])
    config = (FAMILIES | MIXTURES)[family](rng)
    for name, value in fields.items():
        setattr(config, name, value)
    config._attn_implementation = config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    gemma = family.startswith("gemma")  # adds one to its gains, and multiplies its embeddings
    for parameter in model.parameters():
        # Large enough that a wrong rotation, norm or window changes every logit, small enough for float32.
        mean, scale = (0.0, 0.2 if gemma else 0.3) if parameter.dim() > 1 else (0.0 if gemma else 0.7, 0.2)
        values = rng.normal(mean, scale, tuple(parameter.shape))
        parameter.data.copy_(torch.from_numpy(values.astype(np.float32)))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.from_numpy(rng.normal(0, 0.2, tuple(buffer.shape)).astype(np.float32)))
    # Not token 0, the padding: torch gives its embedding no gradient, wherever it stands.
    return Peer(model, rng.integers(1, config.vocab_size, (2, LENGTH)).astype(np.int32))
