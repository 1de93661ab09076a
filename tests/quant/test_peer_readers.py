"""GPTQ and AWQ files beside other readers and writers: an independent one in numpy, and gptqmodel and autoawq."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from jaxllm.convert import quantise as quantising
from jaxllm.convert.quantise import QuantiseConfig, quantise
from jaxllm.hub import load_hf, open_source
from jaxllm.hub.gptq_awq import column_codes
from jaxllm.models import functional
from jaxllm.models.attention_context import Segments
from tests.quant import packing_peer
from tests.quant.packing_peer import LENGTH

IDS = np.arange(LENGTH) * 7 % 64
LAYOUTS = [("gptq", 4, True), ("gptq", 4, False), ("gptq", 3, False), ("gptq", 8, True), ("awq", 4, False)]
PEERS = all(importlib.util.find_spec(name) for name in ("gptqmodel", "awq", "optimum"))
needs_peers = pytest.mark.skipif(not PEERS, reason="needs gptqmodel, autoawq and optimum; see docs/serve/quantise.md")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A small model as transformers writes it, with whole words of 32 bits in every layout."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model") / "plain"
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def without_tokenizer(monkeypatch):
    monkeypatch.setattr(quantising, "copy_tokenizer_files", lambda folder, out: None)


def logits(path: Path) -> np.ndarray:
    """Our logits of a quantised model, [S, V]."""
    model = load_hf(path)
    run = functional(model.config)
    hidden, _ = run.forward(model.params, jnp.asarray(IDS)[None], jnp.arange(LENGTH)[None], Segments())
    return np.asarray(run.head(model.params, hidden))[0]


def of_bits(words: np.ndarray, bits: int) -> np.ndarray:
    """Codes along the first dimension of int32 words, whose bits are one stream, the lowest first: bit by bit."""
    stream = (words.astype(np.uint32)[:, None] >> np.arange(32, dtype=np.uint32)[:, None]) & 1
    stream = stream.reshape(-1, words.shape[1])
    return (stream.reshape(-1, bits, words.shape[1]) << np.arange(bits, dtype=np.uint32)[:, None]).sum(1).astype(int)


def of_nibbles(words: np.ndarray) -> np.ndarray:
    """Codes along the last dimension of AWQ's words: nibbles 0 to 7 are of outputs 0, 2, 4, 6, 1, 3, 5, 7."""
    out = np.zeros((len(words), 8 * words.shape[1]), int)
    for nibble, place in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        out[:, place::8] = words.astype(np.uint32) >> np.uint32(4 * nibble) & np.uint32(15)
    return out


def numpy_reader(path: Path) -> dict[str, torch.Tensor]:
    """Tensors of the plain model, float32, by the layouts' descriptions."""
    given = json.loads((path / "config.json").read_text())["quantization_config"]
    stored, out = load_file(path / "model.safetensors"), {}
    for name, tensor in stored.items():
        stem, _, last = name.rpartition(".")
        if last == "qweight":
            words, zeros, scales = (stored[f"{stem}.{part}"].numpy() for part in ("qweight", "qzeros", "scales"))
            if given["quant_method"] == "awq":
                codes, zero = of_nibbles(words), of_nibbles(zeros)
            else:
                codes = of_bits(words, given["bits"])
                zero = (of_bits(np.ascontiguousarray(zeros.T), given["bits"]).T + 1) % 2 ** given["bits"]
            groups = np.arange(len(codes)) // given["group_size"]
            dense = (codes - zero[groups]) * scales.astype(np.float32)[groups]
            out[f"{stem}.weight"] = torch.from_numpy(np.ascontiguousarray(dense.T.astype(np.float32)))
        elif last not in ("qzeros", "scales", "g_idx"):
            out[name] = tensor
    return out


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("layout", "bits", "symmetric"), LAYOUTS)
def test_another_reader_has_the_same_logits(layout, bits, symmetric, source, tmp_path):
    """A reader in numpy that shares no code with ours, and transformers' forward pass."""
    quantise(open_source(source), tmp_path / "out", QuantiseConfig("rtn", bits, 32, symmetric=symmetric, layout=layout))
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained(source))
    model.load_state_dict(numpy_reader(tmp_path / "out"))
    with torch.no_grad():
        want = model(torch.from_numpy(IDS)[None]).logits[0].numpy()
    np.testing.assert_allclose(logits(tmp_path / "out"), want, rtol=0, atol=1e-5)
    assert np.abs(want - logits(source)).max() > 1e-3


def peer(what: str, given: Path, out: Path) -> dict[str, np.ndarray]:
    """What the other libraries say, in a process of their own."""
    command = [sys.executable, packing_peer.__file__, what, str(given), str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(np.load(out))


@needs_peers
@pytest.mark.parametrize(("layout", "symmetric"), [("gptq", True), ("gptq", False), ("awq", False)])
def test_transformers_and_gptqmodel_open_it(layout, symmetric, source, tmp_path):
    """Their kernel for CPUs dequantises in float16: matrices are ours to its last bit, logits to its rounding."""
    quantise(open_source(source), tmp_path / "out", QuantiseConfig("rtn", 4, 32, symmetric=symmetric, layout=layout))
    found, ours = peer("open", tmp_path / "out", tmp_path / "found.npz"), logits(tmp_path / "out")
    up = np.asarray(load_hf(tmp_path / "out").params["segments"]["0"]["0"]["mlp"]["up"])[0].T
    np.testing.assert_array_equal(found["up"], up.astype(np.float16))
    np.testing.assert_allclose(found["logits"], ours, rtol=0, atol=1e-3 * np.abs(ours).max())


@needs_peers
def test_matrices_that_autoawq_and_gptqmodel_packed_are_bit_exact(rng, tmp_path):
    """Codes and values are those that were packed, and those that both libraries unpack (in float16)."""
    codes = rng.integers(0, 16, (64, 128), dtype=np.uint8)
    scale = rng.uniform(1e-3, 1, (64, 4)).astype(np.float16)
    zero = rng.integers(0, 16, (64, 4)).astype(np.float32)
    np.savez(tmp_path / "given.npz", codes=codes, scale=scale, zero=zero)
    found = peer("pack", tmp_path / "given.npz", tmp_path / "found.npz")
    want = (codes - np.repeat(zero, 32, 1)) * np.repeat(scale.astype(np.float32), 32, 1)
    for name, kind in (("awq", "gemm"), ("gptq", "gptq_v2")):
        parts = {f"layer.{key.partition('.')[2]}": value for key, value in found.items() if key.startswith(name)}
        dense = parts.pop("layer.dense")
        given = {"quant_method": name, "bits": 4, "version": kind, "checkpoint_format": kind}
        one = column_codes(given, parts)["layer.weight"]
        np.testing.assert_array_equal(one.codes(slice(None)), codes)
        np.testing.assert_array_equal(one.dense(slice(None), slice(None)), want)
        np.testing.assert_array_equal(dense, want.astype(np.float16))
