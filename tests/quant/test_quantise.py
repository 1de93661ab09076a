"""Quantised models: those of other libraries' code, plain or packed, whatever the method; stopped and resumed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file

from jaxllm.cli.commands.quantise import quantise as command
from jaxllm.convert import quantise as quantising
from jaxllm.convert.quantise import QuantiseConfig, quantise
from jaxllm.hub import HubError, load_hf, open_source
from jaxllm.hub.compressed_tensors import IntScheme, config_entry
from jaxllm.hub.huggingface import leaves_by_path, load_tensors, read_model
from jaxllm.models import functional
from jaxllm.models.attention_context import Segments
from jaxllm.models.packed_weight import is_packed
from jaxllm.quant import smoothing
from jaxllm.quant.input_statistics import CalibrationError, statistics
from jaxllm.quant.packing import describe_packed
from sharding import MeshSpec
from tests import quick, tiny

ROWS, LENGTH = 6, 24
IDS = np.random.default_rng(5).integers(0, 64, ROWS * LENGTH).tolist()


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A small model as transformers writes it."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model") / "plain"
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def without_tokenizer(monkeypatch):
    monkeypatch.setattr(quantising, "copy_tokenizer_files", lambda folder, out: None)


def logits(model) -> np.ndarray:
    tokens = jnp.asarray(IDS[:LENGTH])[None]
    run = functional(model.config)
    with quick.mesh_of(model.params):
        hidden, _ = run.forward(model.params, tokens, jnp.arange(LENGTH)[None], Segments())
        return np.asarray(run.head(model.params, hidden))


def theirs(path: Path) -> np.ndarray:
    """Logits by compressed-tensors' and transformers' code.

    transformers of today cannot open asymmetric codes of this format, so that matrices are decompressed one by one.
    """
    given = json.loads((path / "config.json").read_text())
    scheme = QuantizationScheme.model_validate(given.pop("quantization_config")["config_groups"]["group_0"])
    stored = load_file(path / "model.safetensors")
    plain = {}
    for name, tensor in stored.items():
        whole = name.removesuffix("_packed")
        if name.endswith("weight_packed"):
            parts = {n.rpartition(".")[2]: t for n, t in stored.items() if n.startswith(whole)}
            plain[whole] = PackedQuantizationCompressor.decompress(parts, scheme)["weight"]
        elif not name.endswith(("_scale", "_shape", "_zero_point")):
            plain[name] = tensor
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(given))
    model.load_state_dict(plain)
    with torch.no_grad():
        return model(torch.tensor([IDS[:LENGTH]])).logits.numpy()


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "config",
    [QuantiseConfig("gptq", 4, 16), QuantiseConfig("awq", 4, 16), QuantiseConfig("smoothquant", 8, 0),
     QuantiseConfig("gptq_act_order", 3, 16), QuantiseConfig("hqq", 2, 16)],
    ids=lambda config: config.method,
)  # fmt: skip
def test_is_that_of_compressed_tensors(config, source, tmp_path):
    config = QuantiseConfig(config.method, config.bits, config.group, None, ROWS, LENGTH)
    report = quantise(open_source(source), tmp_path / "out", config, IDS)
    want, plain = theirs(tmp_path / "out"), logits(load_hf(tmp_path / "out"))
    np.testing.assert_allclose(plain, want, rtol=0, atol=1e-5)
    packed = load_tensors(*read_model(tmp_path / "out"), weights="packed")
    assert sum(map(is_packed, jax.tree.leaves(packed.params, is_leaf=is_packed))) == 7
    np.testing.assert_allclose(logits(packed), plain, rtol=0, atol=1e-5)
    far = np.abs(plain - logits(load_hf(source))).max()
    assert 1e-4 < far < 0.3 * 2 ** (4 - config.bits)
    assert len(report.matrices) == 14
    if config.method.startswith("gptq"):
        assert sum(one.error for one in report.matrices) < 0.9 * sum(one.nearest for one in report.matrices)


@pytest.mark.parametrize("config", [QuantiseConfig("rtn", 4, 16), QuantiseConfig("rtn", codebook="fp8")])
def test_transformers_opens_it(config, source, tmp_path):
    quantise(open_source(source), tmp_path / "out", config)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        want = model(torch.tensor([IDS[:LENGTH]])).logits.numpy()
    np.testing.assert_allclose(logits(load_hf(tmp_path / "out")), want, rtol=0, atol=1e-5)


def test_layouts_hold_the_same_codes(source, tmp_path):
    """GPTQ's and AWQ's files are one model, plain and packed, and nearly that of compressed-tensors, whose scales are
    in float32 instead of float16.
    """
    base = QuantiseConfig("rtn", 4, 16, symmetric=False)
    quantise(open_source(source), tmp_path / "base", base)
    found = []
    for layout in ("gptq", "awq"):
        quantise(open_source(source), tmp_path / layout, dataclasses.replace(base, layout=layout))
        given = json.loads((tmp_path / layout / "config.json").read_text())["quantization_config"]
        assert (given["quant_method"], given["bits"], given["group_size"]) == (layout, 4, 16)
        found.append(logits(load_hf(tmp_path / layout)))
        packed = load_tensors(*read_model(tmp_path / layout), weights="packed")
        lines = describe_packed(packed.params)
        assert lines[0].startswith("int4 with zero points, groups of 16: attention/k, attention/o, attention/q")
        assert len(lines) == 2
        np.testing.assert_allclose(logits(packed), found[-1], rtol=0, atol=1e-5)
    np.testing.assert_array_equal(*found)
    np.testing.assert_allclose(found[0], logits(load_hf(tmp_path / "base")), rtol=0, atol=0.01)
    assert np.abs(found[0] - logits(load_hf(source))).max() > 0.02


@pytest.mark.drawn(3)
def test_float8_stays_packed(source, tmp_path):
    quantise(open_source(source), tmp_path / "out", QuantiseConfig("gptq", 8, 0, None, ROWS, LENGTH, "fp8"), IDS)
    plain = logits(load_hf(tmp_path / "out"))
    packed = load_tensors(*read_model(tmp_path / "out"), weights="packed")
    assert describe_packed(packed.params)[0].startswith("fp8, one group: ")
    np.testing.assert_allclose(logits(packed), plain, rtol=0, atol=1e-5)
    assert 1e-4 < np.abs(plain - logits(load_hf(source))).max() < 0.1


@pytest.mark.parametrize(
    ("bits", "group", "activations", "method", "form"),
    [(8, 0, "int8", "smoothquant", "int8, one group, activations in int8"),
     (4, 16, "int8", "rtn", "int4, groups of 16, activations in int8"),
     (8, 0, "outliers", "rtn", "llm_int8, outliers from 6 on")],
)  # fmt: skip
def test_activations_are_rounded_where_files_say_so(bits, group, activations, method, form, source, tmp_path):
    """Packed, the activations are rounded too; plain, the weights alone."""
    config = QuantiseConfig(method, bits, group, None, ROWS, LENGTH, activations=activations)
    quantise(open_source(source), tmp_path / "out", config, IDS)
    plain = logits(load_hf(tmp_path / "out"))
    packed = load_tensors(*read_model(tmp_path / "out"), weights="packed")
    assert describe_packed(packed.params)[0].startswith(f"{form}: ")
    assert 1e-4 < np.abs(logits(packed) - plain).max() < 0.05
    assert 1e-4 < np.abs(plain - logits(load_hf(source))).max() < 0.3
    with pytest.raises(HubError, match="symmetric integers of 8 or 4 bits"):
        QuantiseConfig("rtn", 3, activations=activations)


@pytest.mark.parametrize(("activations", "codebook"), [("int8", ""), ("", "fp8")])
def test_one_scale_of_all_inputs_goes_to_every_device(activations, codebook, source, tmp_path):
    """Inputs split over devices, each of which has the scale: the logits of one device."""
    config = QuantiseConfig("rtn", 8, 0, activations=activations, codebook=codebook)
    quantise(open_source(source), tmp_path / "out", config)
    want = logits(load_tensors(*read_model(tmp_path / "out"), weights="packed"))
    mesh = MeshSpec.parse("fsdp=2,tensor=2").build(jax.devices()[:4])
    packed = load_tensors(*read_model(tmp_path / "out"), mesh=mesh, weights="packed")
    with jax.set_mesh(mesh):
        tokens = jax.device_put(jnp.asarray(IDS[:LENGTH]).reshape(2, -1), jax.NamedSharding(mesh, jax.P("fsdp")))
        run = functional(packed.config)
        places = jnp.broadcast_to(jnp.arange(LENGTH // 2), tokens.shape)

        def forward(params, tokens):
            return run.head(params, run.forward(params, tokens, places, Segments())[0])

        got = np.asarray(jax.jit(forward)(packed.params, tokens))
    np.testing.assert_allclose(got[0], want[0, : LENGTH // 2], rtol=0, atol=1e-3 if activations else 1e-5)


@pytest.mark.drawn(3)
def test_a_budget_of_bits_is_spent_by_layer(source, tmp_path):
    """The mean of bits is within the budget, files name each layer's, and the error is below that of uniform bits."""
    base = QuantiseConfig("gptq", 4, 16, None, ROWS, LENGTH)
    report = quantise(open_source(source), tmp_path / "out", dataclasses.replace(base, budget=3.5), IDS)
    uniform = quantise(open_source(source), tmp_path / "uniform", dataclasses.replace(base, bits=3), IDS)
    groups = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]["config_groups"].values()
    assert sum(len(group["targets"]) for group in groups) == 14
    assert {one.bits for one in report.matrices} > {one.bits for one in uniform.matrices}
    assert uniform.bytes_after < report.bytes_after < uniform.bytes_after * 1.1
    assert sum(one.nearest for one in report.matrices) < sum(one.nearest for one in uniform.matrices)
    plain = logits(load_hf(tmp_path / "out"))
    packed = load_tensors(*read_model(tmp_path / "out"), weights="packed")
    np.testing.assert_allclose(logits(packed), plain, rtol=0, atol=1e-5)
    with pytest.raises(HubError, match=r"a budget of 1\.5 bits: legal are 2 or more"):
        dataclasses.replace(base, budget=1.5)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("table", "method"), [("lut4", "learned_scales"), ("lut3", "gptq"), ("nf4", "rtn")])
def test_lookup_tables_stay_packed(table, method, source, tmp_path):
    config = QuantiseConfig(method, 8, 16, None, ROWS, LENGTH, table)
    report = quantise(open_source(source), tmp_path / "out", config, IDS)
    plain = logits(load_hf(tmp_path / "out"))
    packed = load_tensors(*read_model(tmp_path / "out"), weights="packed")
    assert describe_packed(packed.params)[0].startswith(f"nf{table[-1]}, groups of 16: ")
    np.testing.assert_allclose(logits(packed), plain, rtol=0, atol=1e-5)
    assert 1e-4 < np.abs(plain - logits(load_hf(source))).max() < 0.6
    assert sum(one.error for one in report.matrices) <= sum(one.nearest for one in report.matrices)


@pytest.mark.drawn(3)
def test_a_run_that_was_stopped_goes_on(source, tmp_path, monkeypatch):
    """Stopped after the first layer, the second run rounds the second alone, to the same bytes."""
    config = QuantiseConfig("gptq", 4, 16, rows=ROWS, length=LENGTH)
    quantise(open_source(source), tmp_path / "whole", config, IDS)

    def stop(name: str, done: int, total: int) -> None:
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantise(open_source(source), tmp_path / "out", config, IDS, stop)
    with pytest.raises(HubError, match=r"out\.partial is of another model, text or setting"):
        quantise(open_source(source), tmp_path / "out", config, IDS[::-1])
    rounded = []
    whole = quantising._Quantiser._quantise_matrix
    monkeypatch.setattr(
        quantising._Quantiser,
        "_quantise_matrix",
        lambda self, path, weight, seen, row: rounded.append(row) or whole(self, path, weight, seen, row),
    )
    report = quantise(open_source(source), tmp_path / "out", config, IDS)
    assert rounded == [1] * 7
    assert len(report.matrices) == 14
    for name in ("model.safetensors", "config.json", quantising.REPORT):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.drawn(2)
@pytest.mark.parametrize("norms", ["pre", "sandwich"])
def test_smoothing_changes_no_result(norms, rng, float64):
    """Exact before rounding, for any factors."""
    config = tiny.decoder(heads=4, kv_heads=2, head_dim=8, layers=1, norms=norms, bias="all", norm="layer")
    model = functional(config)
    params = model.init(jax.random.key(2))
    group = jax.tree.map(lambda leaf: leaf[0] + 0.1, params["segments"]["0"])
    x = jnp.asarray(rng.normal(size=(1, 6, config.embed_dim)))
    run = lambda group: model.group(0, group, x, jnp.arange(6)[None], jnp.int32(0), Segments())[0]  # noqa: E731
    flat = leaves_by_path(group["0"])
    found = smoothing.smoothed_inputs(config.pattern[0], config.norm, tuple(flat))
    assert [one.used for one in found] == [
        ("attention/q", "attention/k", "attention/v"), ("mlp/gate", "mlp/up"), ("mlp/down",), ("attention/o",)
    ]  # fmt: skip
    assert [one.bias for one in found] == ["attention_norm/bias", "mlp_norm/bias", "", "attention/v_bias"]
    for one in found:
        first = flat[one.used[0]]
        channels = first.shape[0] * (first.shape[1] if one.repeats > 1 else 1) // one.repeats
        if one.bias:
            flat = smoothing.shift(flat, one, rng.normal(size=channels))
        flat = smoothing.smooth(flat, one, rng.uniform(0.3, 3, channels))
    changed = jax.tree.unflatten(jax.tree.structure(group), list(flat.values()))
    assert float(jnp.abs(flat["attention/o"] - group["0"]["attention"]["o"]).max()) > 0.01
    np.testing.assert_allclose(run(changed), run(group), rtol=0, atol=1e-12)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("form", ["int4_g16", "int3_g16_asym", "lut4_g16", "w8a8", "w4a8_g16", "llm_int8", "fp8"])
def test_the_command_knows_the_formats(form, source, tmp_path, capsys):
    assert command([str(source), str(tmp_path / "out"), "--format", form, "--method", "rtn"]) == 0
    assert "mlp/down" in capsys.readouterr().out
    kinds = {"lut4_g16": "lookup-table", "llm_int8": "bitsandbytes"}
    given = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert given["quant_method"] == kinds.get(form, "compressed-tensors")
    report = json.loads((tmp_path / "out" / quantising.REPORT).read_text())
    bits = 8 if form in ("w8a8", "llm_int8", "fp8") else 3 if "3" in form else 4
    assert {one["bits"] for one in report["matrices"]} == {bits}


def test_the_command_spends_a_budget(source, tmp_path, capsys):
    arguments = [str(source), str(tmp_path / "out"), "--format", "int4_g16", "--method", "rtn", "--bits-budget", "3.5"]
    assert command(arguments) == 0
    assert "bits by layer" in capsys.readouterr().out


def test_statistics_of_shifted_inputs(rng, float64):
    """Those of the rows less a shift and over factors, and the middle of a channel's range over its query heads."""
    x, by, factors = rng.normal(size=(30, 8)) + 2, rng.normal(size=8), rng.uniform(0.5, 2, 8)
    got = statistics(jnp.asarray(x)).shifted(jnp.asarray(by)).divided(jnp.asarray(factors))
    want = statistics(jnp.asarray((x - by) / factors))
    for name in ("gram", "most", "low", "high", "signed", "count"):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), rtol=1e-10, atol=1e-10)
    assert (np.asarray(got.total) >= np.asarray(want.total) * (1 - 1e-12)).all()
    middle = smoothing.middle_of_channels(x.min(0), x.max(0), (4, 2, 5), 2)
    heads = x.reshape(30, 2, 2, 2)
    np.testing.assert_allclose(middle, ((heads.max((0, 2)) + heads.min((0, 2))) / 2).reshape(-1))


@pytest.mark.drawn(3)
def test_a_shift_halves_the_error_of_asymmetric_activations(tmp_path):
    """SQ-b: heads whose values are far from 0, in w8a8. Biases of Llama's attention take the shift."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, attention_bias=True,
    )  # fmt: skip
    torch.manual_seed(4)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.bias += 8
    model.save_pretrained(tmp_path / "plain")
    source = open_source(tmp_path / "plain")
    want, errors = logits(load_hf(tmp_path / "plain")), []
    for method in ("smoothquant", "smoothquant_bias"):
        config = QuantiseConfig(method, 8, 0, None, ROWS, LENGTH, activations="int8")
        quantise(source, tmp_path / method, config, IDS)
        packed = load_tensors(*read_model(tmp_path / method), weights="packed")
        errors.append(np.linalg.norm(logits(packed) - want))
    assert errors[1] < 0.5 * errors[0]


def test_bad_input_is_refused_by_name(source, tmp_path):
    model = open_source(source)
    with pytest.raises(CalibrationError, match="has 10 tokens, and a row has 24; give more text or a smaller --length"):
        quantise(model, tmp_path / "out", QuantiseConfig("gptq", 4, 16, rows=2, length=LENGTH), IDS[:10])
    with pytest.raises(CalibrationError, match="the calibration text has 0 tokens, and a row has 24"):
        quantise(model, tmp_path / "out", QuantiseConfig("gptq", 4, 16, rows=2, length=LENGTH))
    with pytest.raises(HubError, match="exists; give a new directory"):
        quantise(model, source, QuantiseConfig("rtn"))
    with pytest.raises(HubError, match=r"method 'gtpq': give one of .*gptq.*Did you mean"):
        QuantiseConfig("gtpq")
    with pytest.raises(HubError, match=r"which groups of 32 do not divide.*all matrices: 16"):
        quantise(model, tmp_path / "out", QuantiseConfig("rtn", 4, 32))
    with pytest.raises(HubError, match=r"layout awq has integer codes of 4 bits; choose compressed-tensors"):
        QuantiseConfig("rtn", 3, 16, layout="awq")
    with pytest.raises(HubError, match="hqq moves zero points, which fp8 does not have"):
        QuantiseConfig("hqq", codebook="fp8")
    with pytest.raises(HubError, match=r"which groups of 32 do not divide"):
        quantise(model, tmp_path / "out", QuantiseConfig("rtn", codebook="mxfp4"))
    with pytest.raises(HubError, match="smoothquant_bias shifts inputs by biases, and no layer of this model has one"):
        quantise(model, tmp_path / "bias", QuantiseConfig("smoothquant_bias", 4, 16, None, ROWS, LENGTH), IDS)
    (tmp_path / "bias.partial/run.json").unlink()
    (tmp_path / "bias.partial").rmdir()
    with pytest.raises(HubError, match="learned_scales wants free scales and no zero points"):
        QuantiseConfig("learned_scales", symmetric=False)
    assert list(tmp_path.iterdir()) == []
    damaged = load_file(source / "model.safetensors")
    damaged["model.layers.1.mlp.up_proj.weight"][2, 3] = float("nan")
    broken = tmp_path / "broken"
    broken.mkdir()
    save_file(damaged, broken / "model.safetensors")
    (broken / "config.json").write_text((source / "config.json").read_text())
    with pytest.raises(HubError, match="mlp/up holds values that are not finite"):
        quantise(open_source(broken), tmp_path / "out", QuantiseConfig("rtn", 4, 16))
    quantise(model, tmp_path / "cut", QuantiseConfig("rtn", 4, 16))
    given = json.loads((tmp_path / "cut/config.json").read_text())
    given["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 8
    (tmp_path / "cut/config.json").write_text(json.dumps(given))
    with pytest.raises(HubError, match=r"4 bits in groups of 8 of \[\d+, \d+\] are int32"):
        load_hf(tmp_path / "cut")


def changed_copy(source: Path, folder: Path, **changed: torch.Tensor) -> Path:
    """The model with other tensors, by the ends of their names."""
    folder.mkdir()
    tensors = load_file(source / "model.safetensors")
    for name in tensors:
        for end, value in changed.items():
            if name.endswith(f"{end}.weight"):
                tensors[name] = value.expand(tensors[name].shape).clone()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((source / "config.json").read_text())
    return folder


def test_inputs_that_are_always_zero_are_said(source, tmp_path):
    """Channels of the feed-forward that nothing writes to: the Gram matrix is singular, and the report has it."""
    up = load_file(source / "model.safetensors")["model.layers.0.mlp.up_proj.weight"].clone()
    up[[3, 7, 8]] = 0
    model = open_source(changed_copy(source, tmp_path / "dead", up_proj=up))
    config = QuantiseConfig("gptq", 4, 16, None, ROWS, LENGTH)
    report = quantise(model, tmp_path / "out", config, IDS)
    said = {one.name: one.remark for one in report.matrices if one.remark}
    assert said == {f"segments/0/0/mlp/down[{row}]": "3 inputs are always 0, their weights too" for row in (0, 1)}
    down = load_tensors(*read_model(tmp_path / "out")).params["segments"]["0"]["0"]["mlp"]["down"]
    assert not np.asarray(down)[:, [3, 7, 8]].any()
    assert np.isfinite(np.asarray(down)).all()


def test_activations_that_are_not_finite_are_named(source, tmp_path):
    """Weights whose activations overflow on the text."""
    model = open_source(changed_copy(source, tmp_path / "large", up_proj=torch.tensor(1e38)))
    with pytest.raises(
        CalibrationError, match=r"mlp/down\[0\]: the calibration text gives it inputs that are not finite"
    ):
        quantise(model, tmp_path / "out", QuantiseConfig("gptq", 4, 16, None, ROWS, LENGTH), IDS)


@pytest.mark.parametrize("layout", ["compressed-tensors", "gptq"])
def test_a_truncated_file_is_refused(layout, source, tmp_path):
    quantise(open_source(source), tmp_path / "out", QuantiseConfig("rtn", 4, 16, symmetric=False, layout=layout))
    file = tmp_path / "out/model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    for weights in ("plain", "packed"):
        with pytest.raises(HubError, match=r"model\.safetensors"):
            load_tensors(*read_model(tmp_path / "out"), weights=weights)


@pytest.mark.parametrize(("bits", "group"), [(4, 16), (8, 0), (3, 16)])
def test_a_model_packed_by_compressed_tensors_loads_bit_for_bit(bits, group, source, tmp_path):
    """Every matrix rounded and packed by that library: the values are those that it unpacks, plain and packed."""
    entry = config_entry([IntScheme(bits, group or None, True)], ["lm_head"])
    scheme = QuantizationScheme.model_validate(entry["config_groups"]["group_0"])
    tensors, want = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        rows = tensor.reshape(len(tensor), -1, group or tensor.shape[1])
        scale = rows.abs().amax(-1) / (2 ** (bits - 1) - 0.5)
        packed = PackedQuantizationCompressor.compress({"weight": tensor, "weight_scale": scale}, scheme)
        tensors |= {f"{name.removesuffix('weight')}{part}": value for part, value in packed.items()}
        want[name] = PackedQuantizationCompressor.decompress(packed, scheme)["weight"].numpy()
    (tmp_path / "theirs").mkdir()
    save_file(tensors, tmp_path / "theirs/model.safetensors")
    given = json.loads((source / "config.json").read_text()) | {"quantization_config": entry}
    (tmp_path / "theirs/config.json").write_text(json.dumps(given))
    plain = load_tensors(*read_model(tmp_path / "theirs"))
    packed = load_tensors(*read_model(tmp_path / "theirs"), weights="packed")
    for row in range(2):
        for name, ours in (("gate_proj", "gate"), ("up_proj", "up"), ("down_proj", "down")):
            own, few = (m.params["segments"]["0"]["0"]["mlp"][ours] for m in (plain, packed))
            theirs_ = want[f"model.layers.{row}.mlp.{name}.weight"].T
            np.testing.assert_array_equal(own[row], theirs_)
            np.testing.assert_array_equal(few.dense(jnp.float32)[row], theirs_)
    np.testing.assert_allclose(logits(packed), logits(plain), rtol=0, atol=1e-5)
