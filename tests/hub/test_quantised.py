"""Quantised checkpoints: values equal another decoder's, models equal transformers', errors name the problem."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxllm.convert.inspection import inspect_model
from jaxllm.hub import HubError, decoder_config, export_hf, load_hf, open_source
from jaxllm.hub.quantised_checkpoints import decode_mxfp4, fp8_tensor, mxfp4_tensor, without_quantisation
from jaxllm.hub.safetensors import open_model, write_model
from tests.hub import peers

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [4, 3]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def e4m3(byte: int) -> float:
    """The number of a byte: sign, four bits of exponent, three of mantissa; no infinity, one nan a sign."""
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    if (exponent, mantissa) == (15, 7):
        return np.nan
    size = mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if sign else size


def mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """By ml_dtypes' own numbers of four bits and powers of two."""
    halves = np.stack([blocks & 15, blocks >> 4], axis=-1).astype(np.uint8)
    values = halves.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    powers = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    with np.errstate(over="ignore"):
        return values.reshape(*blocks.shape[:-1], 32) * powers[..., None]


def fp8_blocks(rng: np.random.Generator) -> float:
    """Random blocks with every byte among them, truncated at the edges; any slice of them."""
    rows, columns = (int(n) for n in rng.integers(17, 40, 2))
    block = int(rng.integers(1, 9)), int(rng.integers(1, 9))
    bytes_ = rng.permutation(np.concatenate([np.arange(256), rng.integers(0, 256, rows * columns - 256)]))
    bytes_ = bytes_.astype(np.uint8).reshape(rows, columns)
    scale = rng.normal(size=(-(-rows // block[0]), -(-columns // block[1]))).astype(np.float32) * 1e-3
    got = fp8_tensor("w", bytes_.view(ml_dtypes.float8_e4m3fn), scale, block)
    numbers = np.array([e4m3(byte) for byte in range(256)], np.float32)[bytes_]
    want = numbers * np.kron(scale, np.ones(block, np.float32))[:rows, :columns]
    assert np.asarray(got).tobytes() == want.tobytes() or np.array_equal(np.asarray(got), want, equal_nan=True)
    begin, end = np.sort(rng.integers(0, rows, 2))
    np.testing.assert_array_equal(got[begin:end, 1:], want[begin:end, 1:])
    return float(np.isnan(want).sum())


def mxfp4_blocks(rng: np.random.Generator) -> None:
    """Random bytes under every scale there is, the one that is no number included; any slice."""
    bytes_ = rng.integers(0, 256, (256, 3, 16), dtype=np.uint8)
    scales = np.stack([rng.permutation(256).astype(np.uint8) for _ in range(3)], axis=1)
    np.testing.assert_array_equal(decode_mxfp4(bytes_, scales), mxfp4(bytes_, scales))
    blocks, some = bytes_.reshape(4, 64, 3, 16), scales.reshape(4, 64, 3)
    want = mxfp4(blocks, some).reshape(4, 64, 96).swapaxes(1, 2)
    tensor = mxfp4_tensor("w", blocks, some)
    np.testing.assert_array_equal(np.asarray(tensor), want)
    np.testing.assert_array_equal(tensor[1:3, 5:50, 1:60:2], want[1:3, 5:50, 1:60:2])


def test_blocks_are_what_another_decoder_says(rng: np.random.Generator) -> None:
    assert fp8_blocks(rng) >= 2
    mxfp4_blocks(rng)


def deepseek(folder: Path, rng: np.random.Generator) -> tuple[Path, dict[str, np.ndarray]]:
    """A tiny DeepSeek-V3 in blocks of float8 with layers that predict more, and what its tensors stand for."""
    plain = peers.peer("deepseek_v3", 5).save(folder / "plain")
    stored: dict[str, Any] = {}
    meant: dict[str, np.ndarray] = {}
    for name, array in open_model(plain).items():
        meant[name] = stored[name] = np.array(array)
        if name.endswith("_proj.weight") or name.endswith("with_mqa.weight"):
            shape = tuple(-(-n // b) for n, b in zip(array.shape, FP8["weight_block_size"], strict=True))
            stored[name] = (array * 8).astype(ml_dtypes.float8_e4m3fn)
            stored[name + "_scale_inv"] = scale = rng.uniform(0.05, 0.2, shape).astype(np.float32)
            wide = np.kron(scale, np.ones(FP8["weight_block_size"], np.float32))
            meant[name] = stored[name].astype(np.float32) * wide[: array.shape[0], : array.shape[1]]
    config = json.loads((plain / "config.json").read_text())
    stored[f"model.layers.{config['num_hidden_layers']}.eh_proj.weight"] = meant["model.norm.weight"]
    write_model(folder / "fp8", stored, {"config.json": json.dumps(config | {"quantization_config": FP8})}, 2**30)
    write_model(folder / "meant", meant, {"config.json": json.dumps(config)}, 2**30)
    return folder / "fp8", meant


def test_float8_blocks_become_plain_numbers(tmp_path: Path, rng: np.random.Generator) -> None:
    files, meant = deepseek(tmp_path, rng)
    loaded = load_hf(files)
    export_hf(loaded, tmp_path / "out")
    again = open_model(tmp_path / "out")
    extra = set(again) - set(meant)
    assert len(extra) == 1
    assert next(iter(extra)).endswith("eh_proj.weight")
    assert all(again[name].tobytes() == array.tobytes() for name, array in meant.items())
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    found = inspect_model(files)
    assert found.findings == []
    assert any("quantised (fp8)" in sentence for sentence in found.loading)
    half = load_hf(files, dtype="bfloat16").params["segments"]
    assert {str(x.dtype) for x in _leaves(half)} == {"bfloat16", "float32"}  # the routers' balance stays exact


def _leaves(tree: Any) -> list[Any]:
    return [x for value in tree.values() for x in (_leaves(value) if isinstance(value, dict) else [value])]


def gpt_oss(folder: Path, rng: np.random.Generator, experts: int = 3, width: int = 32) -> Path:
    """A tiny gpt-oss whose experts are MXFP4, by bytes drawn at random."""
    config = peers.transformers.GptOssConfig(
        hidden_size=width, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, vocab_size=40, num_local_experts=experts, num_experts_per_tok=2, max_position_embeddings=128,
    )  # fmt: skip
    model = peers.transformers.GptOssForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith(("sinks", "bias")):
            parameter.data.normal_()
    model.save_pretrained(folder / "plain")
    tensors = {name: np.array(array) for name, array in open_model(folder / "plain").items()}
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, outer = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = rng.integers(0, 256, (experts, outer, inner // 32, 16), dtype=np.uint8)
        tensors[f"{name}_scales"] = rng.integers(118, 123, (experts, outer, inner // 32), dtype=np.uint8)
    given = json.loads((folder / "plain" / "config.json").read_text()) | {"quantization_config": MXFP4}
    write_model(folder / "mxfp4", tensors, {"config.json": json.dumps(given)}, 2**30)
    return folder / "mxfp4"


def test_mxfp4_experts_are_transformers_own(tmp_path: Path, rng: np.random.Generator) -> None:
    """Its dequantised model has our logits, and our export is its model."""
    from tests import quick

    files = gpt_oss(tmp_path, rng)
    loaded = load_hf(files)
    export_hf(loaded, tmp_path / "out")
    theirs = peers.opened(tmp_path / "out")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    packed = open_model(files)
    for name, array in open_model(tmp_path / "out").items():
        if f"{name}_blocks" in packed:
            parts = (peers.torch.from_numpy(np.array(packed[name + end])) for end in ("_blocks", "_scales"))
            np.testing.assert_array_equal(array, convert_moe_packed_tensors(*parts, dtype=peers.torch.float32).numpy())
    tokens = rng.integers(1, 40, (2, 12), dtype=np.int32)
    want = peers.logits_of(theirs, tokens)
    got = quick.logits(loaded.config, loaded.params, tokens)
    assert np.abs(got - want).max() < 1e-4 * np.abs(want).max()
    assert inspect_model(files).findings == []


@pytest.mark.parametrize(
    ("quantisation", "message"),
    [
        (
            {"quant_method": "exl2"},
            "quant_method 'exl2'; known: awq, bitsandbytes, compressed-tensors, fp8, gptq, lookup-table, mxfp4",
        ),
        ("fp8", "quant_method None; known: awq, bitsandbytes, compressed-tensors, fp8, gptq, lookup-table, mxfp4"),
    ],
)
def test_kinds_that_are_not_known_are_named(quantisation: Any, message: str) -> None:
    with pytest.raises(HubError, match=message):
        without_quantisation({"quantization_config": quantisation})


def test_what_is_wrong_with_scales_is_named(tmp_path: Path, rng: np.random.Generator) -> None:
    files, _ = deepseek(tmp_path, rng)
    tensors = {n: np.array(a) for n, a in open_model(files).items()}
    config = json.loads((files / "config.json").read_text())
    name = "model.layers.0.self_attn.o_proj.weight"

    def broken(number: int, more: dict[str, Any], **fields: Any) -> Path:
        folder = tmp_path / str(number)
        given = config | {"quantization_config": FP8 | fields}
        kept = {n: a for n, a in (tensors | more).items() if a is not None}
        write_model(folder, kept, {"config.json": json.dumps(given)}, 2**30)
        return folder

    with pytest.raises(HubError, match=rf"0: {name} is in float8, and there is no {name}_scale_inv beside it"):
        open_source(broken(0, {f"{name}_scale_inv": None}))
    with pytest.raises(HubError, match=rf"{name}_scale_inv has shape \[1, 1\]; blocks of \[4, 3\] make it"):
        load_hf(broken(1, {f"{name}_scale_inv": np.ones((1, 1), np.float32)}))
    with pytest.raises(HubError, match="weight_block_size = 128; legal: two positive numbers"):
        load_hf(broken(2, {}, weight_block_size=128))
    wrong = tensors[name].view(np.uint8).copy()
    wrong[1, 2] = 0x7F
    with pytest.raises(HubError, match=r"attention/o .*holds values that are not finite"):
        load_hf(broken(3, {name: wrong.view(ml_dtypes.float8_e4m3fn)}))
    with pytest.raises(HubError, match="MXFP4 has bytes"):
        mxfp4_tensor("w", np.zeros((2, 3, 1, 8), np.uint8), np.zeros((2, 3, 1), np.uint8))


def test_scoring_functions_that_are_not_known_are_named(tmp_path: Path) -> None:
    config = peers.peer("deepseek_v3", 0).config
    with pytest.raises(HubError, match="scoring_func = 'relu' is not supported; legal: 'sigmoid'"):
        decoder_config(config | {"scoring_func": "relu"})
    with pytest.raises(HubError, match="top_k = 99"):
        decoder_config(config | {"num_experts_per_tok": 99})
    with pytest.raises(HubError, match="groups = 7 does not divide experts"):
        decoder_config(config | {"n_group": 7, "topk_group": 7, "n_routed_experts": 8})
