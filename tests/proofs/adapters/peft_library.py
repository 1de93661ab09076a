"""The library peft: adapters that it made load here, and adapters written here load there, with the same logits."""

from __future__ import annotations

import dataclasses
import tempfile
import warnings
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxllm.hub import load_hf
from jaxllm.models import functional
from jaxllm.models.attention_context import Segments
from jaxllm.peft import adapted_params, merged_params, read_peft, with_adapter, write_peft
from tests.proofs.harness import proof

FAMILIES = ("llama", "gpt2", "phi3", "gemma2", "qwen2")
KINDS = ("lora", "rslora", "dora")
SIZES: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 16,
    "intermediate_size": 20,
    "max_position_embeddings": 64,
}


def config_of(family: str, common: dict[str, Any]) -> Any:
    """A tiny configuration of transformers."""
    import transformers

    if family == "gpt2":
        return transformers.GPT2Config(
            n_embd=16, n_head=4, n_layer=3, n_positions=64, vocab_size=40, bos_token_id=1, eos_token_id=2
        )
    more = {
        "llama": {"head_dim": 8, "tie_word_embeddings": False},
        "gemma2": {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8},
    }
    kind = {
        "llama": transformers.LlamaConfig,
        "phi3": transformers.Phi3Config,
        "gemma2": transformers.Gemma2Config,
        "qwen2": transformers.Qwen2Config,
    }[family]
    return kind(**common, **SIZES, **more.get(family, {}))


def logits(config: Any, params: Any, tokens: np.ndarray) -> np.ndarray:
    """Logits of this library."""
    model, tokens = functional(config), jnp.asarray(tokens)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _ = model.forward(params, tokens, positions, Segments(jnp.ones_like(tokens)))
    return np.asarray(model.head(params, hidden))


@proof(
    "adapters",
    cases=[(family, kind) for family in FAMILIES for kind in KINDS],
    sample=1,
    float64=True,
    bound={"read": 1e-10, "merged": 1e-10, "written": 1e-10},
)
def adapters_of_peft(case: tuple[str, str]) -> dict[str, float]:
    """Largest differences of logits; the file that was read is written to the byte; ranks differ between layers."""
    family, kind = case
    import peft
    import torch
    import transformers

    from tests.hub import peers

    rng = np.random.default_rng([*family.encode(), *kind.encode()])
    torch.manual_seed(int(rng.integers(2**31)))
    with tempfile.TemporaryDirectory() as name, peers.float64(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft uses names that transformers will rename
        folder = Path(name)
        base = transformers.AutoModelForCausalLM.from_config(config_of(family, peers.COMMON)).eval().double()
        for param in base.parameters():
            param.data = torch.randn_like(param) * 0.3 + (1 if param.ndim == 1 else 0)
        base.save_pretrained(folder / "base")
        config = peft.LoraConfig(
            r=4,
            lora_alpha=6,
            target_modules="all-linear",
            use_rslora=kind == "rslora",
            use_dora=kind == "dora",
            rank_pattern={} if kind == "dora" else {r".*\.1\..*": 2},
            alpha_pattern={} if kind == "dora" else {r".*\.2\..*": 3},
            task_type="CAUSAL_LM",
        )
        theirs = peft.get_peft_model(base, config)
        for parameter, param in theirs.named_parameters():
            if "lora_" in parameter:
                param.data = torch.randn_like(param) * 0.3
        theirs = theirs.double().eval()
        tokens = rng.integers(0, 40, (2, 9))
        want = theirs(torch.tensor(tokens)).logits.detach().numpy()
        theirs.save_pretrained(folder / "theirs")

        loaded = load_hf(folder / "base", dtype="float64")
        model = functional(loaded.config)
        adapter = read_peft(folder / "theirs", model, loaded.source)
        write_peft(folder / "again", adapter, model, loaded.source)
        file = "adapter_model.safetensors"
        assert (folder / "again" / file).read_bytes() == (folder / "theirs" / file).read_bytes()
        own = dataclasses.replace(adapter, settings={}, base=str(folder / "base"))
        write_peft(folder / "ours", own, model, loaded.source)
        fresh = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float64)
        written = peft.PeftModel.from_pretrained(fresh, folder / "ours").double().eval()
        back = written(torch.tensor(tokens)).logits.detach().numpy()
        found = {
            "read": logits(loaded.config, adapted_params(model, loaded.params, adapter), tokens),
            "merged": logits(loaded.config, merged_params(model, loaded.params, adapter), tokens),
            "written": back,
        }
        assert np.abs(logits(loaded.config, loaded.params, tokens) - want).max() > 0.1
        return {name: float(np.abs(value - want).max()) for name, value in found.items()}


@proof(
    "adapters",
    cases=[(family, kind) for family in FAMILIES for kind in ("prefix", "prompt")],
    sample=1,
    float64=True,
    bound={"read": 1e-10, "written": 1e-10},
)
def virtual_tokens_of_peft(case: tuple[str, str]) -> dict[str, float]:
    """Largest differences of logits; the file that was read is written to the byte."""
    family, kind = case
    import peft
    import torch
    import transformers

    from tests.hub import peers

    rng = np.random.default_rng([*family.encode(), *kind.encode()])
    torch.manual_seed(int(rng.integers(2**31)))
    with tempfile.TemporaryDirectory() as name, peers.float64(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(name)
        sizes = config_of(family, peers.COMMON)
        if getattr(sizes, "head_dim", None):  # peft takes the width over the number of heads
            sizes.head_dim = sizes.hidden_size // sizes.num_attention_heads
        base = transformers.AutoModelForCausalLM.from_config(sizes).eval().double()
        for param in base.parameters():
            param.data = torch.randn_like(param) * 0.3 + (1 if param.ndim == 1 else 0)
        base.save_pretrained(folder / "base")
        of_kind = {"prefix": peft.PrefixTuningConfig, "prompt": peft.PromptTuningConfig}[kind]
        theirs = peft.get_peft_model(base, of_kind(num_virtual_tokens=5, task_type="CAUSAL_LM"))
        theirs.prompt_encoder["default"].embedding.weight.data.normal_(0, 0.5)
        theirs = theirs.double().eval()
        tokens = rng.integers(0, 40, (2, 9))
        want = theirs(torch.tensor(tokens)).logits.detach().numpy()[:, -9:]
        theirs.save_pretrained(folder / "theirs")

        loaded = load_hf(folder / "base", dtype="float64")
        model = functional(loaded.config)
        adapter = read_peft(folder / "theirs", model, loaded.source)
        write_peft(folder / "again", adapter, model, loaded.source)
        file = "adapter_model.safetensors"
        assert (folder / "again" / file).read_bytes() == (folder / "theirs" / file).read_bytes()
        own = dataclasses.replace(adapter, settings={}, base=str(folder / "base"))
        write_peft(folder / "ours", own, model, loaded.source)
        fresh = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float64)
        written = peft.PeftModel.from_pretrained(fresh, folder / "ours").double().eval()
        found = {
            "read": virtual_logits(model, loaded.params, adapter, tokens),
            "written": written(torch.tensor(tokens)).logits.detach().numpy()[:, -9:],
        }
        assert np.abs(logits(loaded.config, loaded.params, tokens) - want).max() > 0.1
        return {name: float(np.abs(value - want).max()) for name, value in found.items()}


def virtual_logits(model: Any, params: Any, adapter: Any, tokens: np.ndarray) -> np.ndarray:
    """Logits of texts after virtual tokens, two texts in one row."""
    adapted, params = with_adapter(model, params, adapter)
    first, length = 5, tokens.shape[1]
    row = jnp.asarray(np.concatenate([np.zeros(first, int), *tokens]))[None]
    ids = jnp.asarray(np.repeat([0, 1, 2], [first, length, length]))[None]
    text = np.arange(first, first + length)
    positions = jnp.asarray(np.concatenate([np.arange(first), text, text]))[None]
    hidden, _ = adapted.forward(params, row, positions, adapted.text_context(ids))
    return np.asarray(adapted.head(params, hidden))[0, first:].reshape(2, length, -1)
