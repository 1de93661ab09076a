"""GGUF files: equal outputs to the converted model, for each format, and for one real model."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType as Ggml

from jaxllm.hub import load_gguf, load_hf, open_source
from jaxllm.hub.gguf import ggml_formats
from jaxllm.hub.gguf.gguf_model import find_smollm2
from jaxllm.hub.safetensors import open_model, write_model
from tests import environment, quick
from tests.hub import gguf_writer, peers
from tests.hub.test_ggml import QUANTISED, blocks, decoded
from tests.proofs.harness import proof
from tests.proofs.real_models.families import error

PLAIN, BLOCKS = (Ggml.F32, Ggml.F16, Ggml.BF16), (Ggml.Q8_0, Ggml.Q4_0, Ggml.Q5_1)
"""Formats that the gguf package can write; those of blocks need rows of a multiple of 32 values."""
FULL, SLIDING = "full_attention", "sliding_attention"


def draw(arch: str, rng: np.random.Generator) -> dict[str, Any]:
    """A configuration of an architecture as transformers saves it, of random sizes."""
    heads, kv_heads = [(2, 1), (4, 2), (3, 3), (6, 2)][rng.integers(4)]
    head_dim = int(rng.choice([32, 64]) if arch == "phi3" else rng.choice([8, 16, 32]))
    wide = arch in ("qwen2", "phi3")  # whose heads make up the width
    config: dict[str, Any] = {
        "model_type": {"gemma3": "gemma3_text"}.get(arch, arch),
        "hidden_size": heads * head_dim if wide else 32 * int(rng.integers(1, 3)),
        "intermediate_size": 32 * int(rng.integers(1, 4)),
        "max_position_embeddings": 128,
        "num_attention_heads": heads,
        "num_hidden_layers": int(rng.integers(1, 5)),
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": float(rng.choice([1e-6, 1e-5])),
        "tie_word_embeddings": bool(rng.integers(2)) or arch.startswith("gemma"),
        "vocab_size": int(rng.integers(30, 50)),
        "rope_parameters": rope(arch, head_dim, rng),
    }
    if arch not in ("qwen2", "phi3"):
        config["head_dim"] = head_dim
    return config | MORE[arch](config, rng)


def rope(arch: str, head_dim: int, rng: np.random.Generator) -> dict[str, Any]:
    """A rotary embedding that files of this architecture can hold."""
    theta = 10000.0 if arch == "gemma2" else float(rng.choice([100.0, 10000.0, 5e5]))
    base = {"rope_theta": theta}
    kinds = {"llama": ["default", "linear", "yarn", "llama3"], "gemma2": ["default"], "phi3": ["default", "longrope"]}
    kind = str(rng.choice(kinds.get(arch, ["default", "linear"])))
    if arch == "phi3":
        base["partial_rotary_factor"] = fraction = float(rng.choice([0.5, 1.0]))
        pairs = int(head_dim * fraction) // 2
    if kind == "linear":
        base["factor"] = float(rng.integers(2, 9))
    if kind == "yarn":
        base |= {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0, "beta_slow": 2.0}
    if kind == "llama3":
        # The file has the factors it comes to; the numbers follow from one that lies between and one that does not.
        between = 2 * np.pi * theta ** (2 * rng.integers(1, head_dim // 4 + 1) / head_dim)
        base |= {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        base["original_max_position_embeddings"] = int(2 * between)
    if kind == "longrope":
        factors = [[round(float(f), 3) for f in rng.uniform(1, 4, pairs)] for _ in range(2)]
        base |= {"short_factor": factors[0], "long_factor": factors[1], "original_max_position_embeddings": 16}
    return {"rope_type": kind} | base


def _gemma(config: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    config["hidden_activation"] = "gelu_pytorch_tanh"
    return {"query_pre_attn_scalar": config["head_dim"], "sliding_window": int(rng.integers(1, 9))}


def _gemma2(config: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    caps = {"attn_logit_softcapping": float(rng.integers(2, 9)), "final_logit_softcapping": float(rng.integers(2, 9))}
    kinds = [SLIDING if i % 2 == 0 else FULL for i in range(config["num_hidden_layers"])]
    return _gemma(config, rng) | caps | {"layer_types": kinds}


def _gemma3(config: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    config["num_hidden_layers"] = layers = int(rng.integers(1, 9))
    kinds = [FULL if (i + 1) % 6 == 0 else SLIDING for i in range(layers)]
    ropes = {FULL: config["rope_parameters"], SLIDING: {"rope_type": "default", "rope_theta": 10000.0}}
    return _gemma(config, rng) | {"layer_types": kinds, "rope_parameters": ropes}


def _phi3(config: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"original_max_position_embeddings": 16, "sliding_window": [None, 7][rng.integers(2)], "hidden_act": "silu"}


def _plain(config: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"hidden_act": "silu"}


def _llama(config: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    biases = {"attention_bias": bool(rng.integers(2)), "mlp_bias": bool(rng.integers(2))}
    return _plain(config, rng) | biases


MORE = {"llama": _llama, "qwen2": _plain, "qwen3": _plain, "gemma2": _gemma2, "gemma3": _gemma3, "phi3": _phi3}
"""What each architecture has beside what all have."""


def rounded(directory: Path, out: Path, kind: Ggml) -> Path:
    """The same model, its matrices as the format ``kind`` holds them."""

    def one(array: np.ndarray) -> np.ndarray:
        return array if array.ndim < 2 else gguf.quants.dequantize(gguf.quants.quantize(np.array(array), kind), kind)

    tensors = {name: one(array) for name, array in open_model(directory).items()}
    write_model(out, tensors, {"config.json": (directory / "config.json").read_text()}, 2**30)
    return out


def same_logits(arch: str, seed: int) -> float:
    """The file's configuration is the directory's, and so are its logits."""
    rng = np.random.default_rng([seed, *arch.encode()])
    config = draw(arch, rng)
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    rows = hidden, heads * config.get("head_dim", hidden // heads), config["intermediate_size"]
    formats = (*PLAIN, *BLOCKS) if all(row % 32 == 0 for row in rows) else PLAIN
    kind = formats[rng.integers(len(formats))]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        exact = gguf_writer.save(config, folder / "exact", seed)
        ours = load_gguf(gguf_writer.write(exact, folder / "m.gguf", kind))
        theirs = load_hf(rounded(exact, folder / "rounded", kind))
    assert ours.config == theirs.config, json.dumps(config)
    tokens = rng.integers(0, config["vocab_size"], (2, 24), dtype=np.int32)
    got, want = (quick.logits(m.config, m.params, tokens) for m in (ours, theirs))
    return error(got, want)


for _arch in MORE:
    proof("real_models", name=f"gguf_{_arch}", count=20, sample=1, bound=1e-5)(functools.partial(same_logits, _arch))


@proof("real_models", count=50, sample=2)
def gguf_quants(seed: int) -> None:
    """Every quantised format: random blocks, bit for bit as the gguf package decodes them."""
    rng = np.random.default_rng(seed)
    for kind in QUANTISED:
        data = blocks(kind, int(rng.integers(1, 400)), rng)
        theirs = gguf.quants.dequantize(data[None], Ggml[kind.name])
        assert decoded(kind, data).tobytes() == theirs.tobytes(), kind.name
    assert {kind.name for kind in ggml_formats.KINDS.values() if kind.decode} == {kind.name for kind in QUANTISED}


TEXT = """The tallest trees of the forest stood along the river, where the ground was wet all year. In spring the \
water rose over the roots and left behind a fine grey silt. Anna had measured one of them when she was ten: she needed \
six of her arms to reach around it. Now, thirty years later, she needed only four, and the tree had grown.

def fibonacci(n: int) -> int:
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)
"""


@proof("real_models", count=1, sample=1, bound={"mean": 1e-4, "token": 1e-3})
def smollm2_nll(_: int) -> dict[str, float]:
    """SmolLM2's negative log-likelihood of a text, of its mean and of each token, beside transformers' GGUF loader."""
    file = find_smollm2()
    where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name, "local_files_only": True}
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):  # it shows how far it is
        warnings.simplefilter("ignore")
        model = peers.transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=peers.torch.float32).eval()
        tokenizer = peers.transformers.AutoTokenizer.from_pretrained(**where)
        tokens = np.array(tokenizer(TEXT, return_tensors="np").input_ids, np.int32)
        reference = peers.logits_of(model, tokens)
    source = open_source(file)
    np.testing.assert_array_equal(source.tokenizer.encode(TEXT, bos=source.tokenizer.adds_bos), tokens[0])
    loaded = source.load()
    ours, theirs = (
        _log_likelihoods(logits, tokens) for logits in (quick.logits(loaded.config, loaded.params, tokens), reference)
    )
    assert len(ours) > 100
    return {"mean": abs(ours.mean() - theirs.mean()), "token": np.abs(ours - theirs).max()}


def _log_likelihoods(logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Float64 log-probability of every next token of one text."""
    scores = logits[0, :-1].astype(np.float64)
    scores -= scores.max(-1, keepdims=True)
    scores -= np.log(np.exp(scores).sum(-1, keepdims=True))
    return np.take_along_axis(scores, tokens[0, 1:, None], axis=1)[:, 0]


PEAK = """
import sys
import jax, jax.numpy as jnp
from jaxllm.hub.gguf.gguf_model import find_smollm2, load_gguf

def memory(field):
    return 1024 * next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))

jnp.zeros(1).block_until_ready()
before = memory("VmRSS")
params = jax.block_until_ready(load_gguf(find_smollm2(), dtype=sys.argv[1]).params)
weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
print(weights, (memory("VmHWM") - before) / weights)
"""


@proof("real_models", count=1, sample=1, bound={"float32": 1.3, "bfloat16": 1.3}, parallel=False)
def smollm2_memory(_: int) -> dict[str, float]:
    """The peak of loading SmolLM2, above the process's size before, by the bytes of its weights."""
    peaks = {}
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        command = [sys.executable, "-c", PEAK, dtype]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=environment.ROOT)
        weights, peaks[dtype] = done.stdout.split()
        assert int(weights) == 134_515_008 * size
    return {dtype: float(peak) for dtype, peak in peaks.items()}
