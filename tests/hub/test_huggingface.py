"""Models saved by transformers: round trips to the byte; errors that name the problem.

That they compute the same is proven by ``tests/proofs/real_models``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

import sharding
from jaxllm.hub import HubError, decoder_config, export_hf, load_hf
from jaxllm.hub.families.families import FAMILIES
from jaxllm.hub.safetensors import open_model, write_model
from jaxllm.models import DynamicScaling, LinearScaling, Llama3Scaling, LongRopeScaling, YarnScaling
from tests.hub import peers

LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 40,
    "max_position_embeddings": 128,
    "rope_parameters": LLAMA3 | {"original_max_position_embeddings": 16},
}
Saved = Callable[[str], Path]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A model of a family, saved by transformers; not to be written to."""
    made: dict[str, Path] = {}

    def save(family: str) -> Path:
        if family not in made:
            made[family] = peers.peer(family, 0).save(tmp_path_factory.mktemp(family))
        return made[family]

    return save


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose sizes fit eight devices."""
    directory = tmp_path_factory.mktemp("llama")
    model = peers.transformers.LlamaForCausalLM(peers.transformers.LlamaConfig(**LLAMA))
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink()
    return directory


def test_every_family_has_a_peer() -> None:
    assert {peers.peer(name, 0).config["model_type"] for name in peers.FAMILIES | peers.MIXTURES} == set(FAMILIES)


def same_files(before: Path, after: Path) -> None:
    """Every tensor to the byte, every field of the configuration."""
    old, new = open_model(before), open_model(after)
    assert set(old) == set(new)
    for name, array in old.items():
        assert array.dtype == new[name].dtype, name
        assert array.shape == new[name].shape, name
        assert array.tobytes() == new[name].tobytes(), name
    assert json.loads((before / "config.json").read_text()) == json.loads((after / "config.json").read_text())


@pytest.mark.parametrize("mesh", ["data=1", "fsdp=4,tensor=2", "tensor=4,data=2"])
def test_round_trip_on_meshes_is_equal_to_the_byte(llama: Path, mesh: str, tmp_path: Path) -> None:
    spec = sharding.MeshSpec.parse(mesh)
    devices = jax.devices()[: np.prod([size for _, size in spec.axes])]
    export_hf(load_hf(llama, mesh=spec.build(devices)), tmp_path / "out", shard_bytes=6000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    same_files(llama, tmp_path / "out")


def test_each_device_holds_its_slice_only(llama: Path) -> None:
    loaded = load_hf(llama, mesh=sharding.MeshSpec.parse("fsdp=4,tensor=2").build())
    q = loaded.params["segments"]["0"]["0"]["attention"]["q"]
    assert {shard.data.shape for shard in q.addressable_shards} == {(3, 16 // 4, 4 // 2, 8)}


def test_bfloat16_files_keep_their_bits(saved: Saved, tmp_path: Path) -> None:
    tensors = {n: a.astype(ml_dtypes.bfloat16) for n, a in open_model(saved("gemma2")).items()}
    config = (saved("gemma2") / "config.json").read_text().replace("float32", "bfloat16")
    write_model(tmp_path / "in", tensors, {"config.json": config}, 2**30)
    export_hf(load_hf(tmp_path / "in", dtype="bfloat16"), tmp_path / "out")
    after = open_model(tmp_path / "out")
    assert all(after[name].tobytes() == array.tobytes() for name, array in tensors.items())


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    """A model's directory to damage."""
    return Path(shutil.copytree(llama, tmp_path / "model"))


def rewrite(directory: Path, change: Any) -> None:
    """Applies ``change`` to the model's tensors."""
    tensors = {name: np.array(array) for name, array in open_model(directory).items()}
    change(tensors)
    config = (directory / "config.json").read_text()
    shutil.rmtree(directory)
    write_model(directory, tensors, {"config.json": config}, 2**30)


def reconfigure(directory: Path, **fields: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: reconfigure(d, model_type="lama"), "Did you mean 'llama'.*gemma2.*qwen3"),
        (lambda d: reconfigure(d, logit_scale=0.5), "'logit_scale' = 0.5, which is not understood"),
        (lambda d: reconfigure(d, pretraining_tp=2), "pretraining_tp = 2 is not supported; legal: 1"),
        (lambda d: reconfigure(d, hidden_size="16"), "hidden_size = '16' is not of the kind int"),
        (lambda d: reconfigure(d, attention_bias=1), "attention_bias = 1 is not of the kind bool"),
        (lambda d: reconfigure(d, num_hidden_layers=None), "lacks 'num_hidden_layers'"),
        (lambda d: reconfigure(d, num_key_value_heads=3), "kv_heads = 3 does not divide heads = 4"),
        (lambda d: reconfigure(d, head_dim=7), "7 of 7 dimensions would be rotated"),
        (
            lambda d: reconfigure(d, rope_parameters={"rope_type": "mrope"}),
            "rope_type 'mrope'; known: default, dynamic",
        ),
        (lambda d: reconfigure(d, rope_parameters={"rope_type": "linear"}), "rotary embedding lacks 'factor'"),
        (lambda d: reconfigure(d, rope_parameters={"rope_type": "default", "beta": 1}), "the field 'beta' = 1, which"),
        (lambda d: reconfigure(d, hidden_act="relu2"), "hidden_act is 'relu2'; known: gelu"),
        (lambda d: (d / "config.json").write_text("{"), "cannot be read"),
        (lambda d: (d / "config.json").unlink(), "no config.json"),
        (lambda d: rewrite(d, lambda t: t.pop("model.norm.weight")), "missing: model.norm.weight"),
        (lambda d: rewrite(d, lambda t: t.update({"extra.weight": t["model.norm.weight"]})), "not used: extra.weight"),
        (lambda d: reconfigure(d, intermediate_size=32), "mlp.gate_proj.weight has shape .24, 16.; .* .32, 16."),
        (
            lambda d: rewrite(d, lambda t: t["model.layers.1.mlp.up_proj.weight"].__setitem__((0, 0), np.nan)),
            r"mlp/up \(row 1 of its layers\) holds values that are not finite",
        ),
        (lambda d: (d / "model.safetensors").unlink(), "neither model.safetensors nor"),
        (
            lambda d: ((d / "model.safetensors").unlink(), (d / "pytorch_model.bin").write_bytes(b"x")),
            "pickle files can run any code",
        ),
        (
            lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:-8]),
            "is cut short",
        ),
        (lambda d: (d / "model.safetensors").write_bytes(b"\xff" * 64), "not a safetensors file"),
        (
            lambda d: (d / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}'),
            "lacks the shard gone.safetensors",
        ),
    ],
)
def test_what_is_wrong_is_named(copy: Path, damage: Any, message: str) -> None:
    damage(copy)
    with pytest.raises(HubError, match=message):
        load_hf(copy)


def test_tensors_that_are_computed_are_carried_through(copy: Path, tmp_path: Path) -> None:
    inverse = np.arange(4, dtype=np.float32)
    rewrite(copy, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": inverse}))
    export_hf(load_hf(copy), tmp_path / "out")
    same_files(copy, tmp_path / "out")


def test_a_tied_head_saved_twice_must_be_the_same(saved: Saved, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(saved("smollm2"), tmp_path / "model"))
    rewrite(copy, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))
    export_hf(load_hf(copy), tmp_path / "out")
    same_files(copy, tmp_path / "out")
    rewrite(copy, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    with pytest.raises(HubError, match=r"lm_head.weight differs"):
        load_hf(copy)


def test_files_of_the_inner_model_keep_their_names(saved: Saved, tmp_path: Path) -> None:
    """GPT-2 as it was first released: no prefix, and causal masks among the weights."""
    copy = Path(shutil.copytree(saved("gpt2"), tmp_path / "model"))

    def strip(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = np.tril(np.ones((1, 1, 8, 8), np.float32))

    rewrite(copy, strip)
    export_hf(load_hf(copy), tmp_path / "out")
    same_files(copy, tmp_path / "out")


def test_a_failed_export_leaves_nothing(llama: Path, tmp_path: Path) -> None:
    loaded = load_hf(llama)

    def fail(name: str, done: int, total: int) -> None:
        if done == 5:
            raise OSError("no space left on device")

    with pytest.raises(HubError, match="no space left"):
        export_hf(loaded, tmp_path / "out", progress=fail)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").mkdir()
    with pytest.raises(HubError, match="exists"):
        export_hf(loaded, tmp_path / "out")


ROPES = [
    ({"rope_type": "linear", "factor": 2.0}, LinearScaling),
    ({"rope_type": "dynamic", "factor": 2.0}, DynamicScaling),
    ({k: v for k, v in LLAMA3.items() if k != "rope_theta"}, Llama3Scaling),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, YarnScaling),
    ({"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}, LongRopeScaling),
]


@pytest.mark.parametrize(("rope", "kind"), ROPES)
def test_earlier_rope_fields_mean_the_same(rope: dict[str, Any], kind: type) -> None:
    rest = {k: v for k, v in LLAMA.items() if k != "rope_parameters"}
    rest |= {"model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5}
    new = rest | {"rope_parameters": rope | {"rope_theta": 77.0}}
    older = rest | {"rope_theta": 77.0, "rope_scaling": rope}
    oldest = rest | {"rope_theta": 77.0}
    oldest |= {"rope_scaling": {"type" if k == "rope_type" else k: v for k, v in rope.items()}}
    assert isinstance(decoder_config(new).pattern[0].attention.rope.scaling, kind)
    assert decoder_config(older) == decoder_config(oldest) == decoder_config(new)


GEMMA = LLAMA | {"rope_parameters": None, "query_pre_attn_scalar": 8, "rms_norm_eps": 1e-6, "sliding_window": 4}
PHI = {k: v for k, v in LLAMA.items() if k not in ("head_dim", "rope_parameters")} | {"hidden_act": "silu"}
PHI |= {"rms_norm_eps": 1e-5, "pad_token_id": 0, "max_position_embeddings": 8192, "hidden_size": 32}
LONG = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
SILU = {k: v for k, v in LLAMA.items() if k != "rope_parameters"} | {"hidden_act": "silu", "rms_norm_eps": 1e-5}
LEFT_OUT = {
    "gemma2": GEMMA | {"model_type": "gemma2"},
    "gemma2, hidden_act": GEMMA | {"model_type": "gemma2", "hidden_act": "gelu"},
    "gemma3, hidden_act": GEMMA | {"model_type": "gemma3_text", "hidden_act": "gelu"},
    "gemma2, null": GEMMA | {"model_type": "gemma2", "attn_logit_softcapping": None, "final_logit_softcapping": None},
    "phi3, longrope": PHI | {"model_type": "phi3", "rope_scaling": LONG},
    "mistral": SILU | {"model_type": "mistral"},
    "mistral, null": SILU | {"model_type": "mistral", "sliding_window": None},
    "qwen2": SILU | {"model_type": "qwen2", "use_sliding_window": True, "head_dim": 4, "max_window_layers": 1},
    "rope twice": SILU
    | {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 8.0}}
    | {"rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}},
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_field_that_is_left_out_means_what_transformers_takes_it_for(name: str, tmp_path: Path) -> None:
    """Windows of 4,096 do not show on short texts, so configurations are compared too."""
    (tmp_path / "config.json").write_text(json.dumps(LEFT_OUT[name]))
    filled = peers.transformers.AutoConfig.from_pretrained(tmp_path).to_dict()
    assert decoder_config(LEFT_OUT[name]) == decoder_config(filled)


@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen3", "gemma2", "gemma3_text"])
def test_sizes_are_never_guessed(kind: str) -> None:
    given = {k: v for k, v in (GEMMA | SILU).items() if k != "num_key_value_heads"} | {"model_type": kind}
    with pytest.raises(HubError, match="lacks 'num_key_value_heads'"):
        decoder_config(given)


def test_how_to_sample_is_not_the_models() -> None:
    more = {"max_length": 20, "temperature": 0.7, "do_sample": True, "unsloth_fixed": True, "_num_labels": 2}
    assert decoder_config(SILU | {"model_type": "llama"} | more) == decoder_config(SILU | {"model_type": "llama"})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rms_norm_eps": -1.0}, "norm_eps = -1.0"),
        ({"rope_theta": 0}, "theta = 0"),
        ({"rope_scaling": {"type": "linear", "factor": -2.0}}, "factor = -2.0 in LinearScaling"),
        ({"max_position_embeddings": "64"}, "max_position_embeddings = '64' is not of the kind int"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(HubError, match=message):
        decoder_config(SILU | {"model_type": "llama"} | fields)
