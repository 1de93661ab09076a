"""PEFT files: what is written is read again, patterns select modules as PEFT does, and damaged files are named."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.hub import decoder_config
from jaxllm.hub.safetensors import open_file, write_file
from jaxllm.models import functional
from jaxllm.models.attention_context import Segments
from jaxllm.peft import Adapter, AdapterError, LowRank, adapted_params, merged_params, read_peft, write_peft
from jaxllm.peft.adapter import factor_shapes
from jaxllm.peft.peft_targets import module_targets, pattern_value

pytestmark = pytest.mark.usefixtures("float64")

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
}
LLAMA = {"model_type": "llama", **SIZES}
PHI3 = {"model_type": "phi3", "pad_token_id": 0, **SIZES}


def base(source: dict[str, Any]) -> Any:
    config = dataclasses.replace(decoder_config(source), dtype="float64", param_dtype="float64")
    return functional(config)


def drawn(model: Any, kind: str = "lora", rank: int = 3, only: tuple[str, ...] = ()) -> Adapter:
    rng = np.random.default_rng(0)
    linears = {p: one for p, one in model.linears().items() if not only or p.endswith(only)}
    shapes = {path: factor_shapes(one, rank) for path, one in linears.items()}
    factors = {p: LowRank(rng.normal(size=a), rng.normal(size=b), 0.5) for p, (a, b) in shapes.items()}
    norms = {p: rng.normal(size=(2, *one.shape[one.contract :])) for p, one in linears.items()}
    return Adapter(kind, factors, dict.fromkeys(factors, (rank, rank)), norms if kind == "dora" else {})  # type: ignore


def logits(model: Any, params: Any) -> np.ndarray:
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 32, (1, 6)))
    positions = jnp.arange(6)[None]
    return np.asarray(model.head(params, model.forward(params, tokens, positions, Segments(jnp.ones((1, 6), int)))[0]))


@pytest.mark.parametrize("kind", ["lora", "rslora", "dora"])
@pytest.mark.parametrize("source", [LLAMA, PHI3], ids=["llama", "phi3"])
def test_what_is_written_is_read(tmp_path: Path, kind: str, source: dict[str, Any]) -> None:
    """Factors of own input factors, in a fused family too, and the merged weights equal the adapted ones."""
    model = base(source)
    params = model.init(jax.random.key(0))
    adapter = drawn(model, kind)
    write_peft(tmp_path / "one", adapter, model, source)
    read = read_peft(tmp_path / "one", model, source)
    assert (read.kind, set(read.factors)) == (kind, set(adapter.factors))
    write_peft(tmp_path / "two", read, model, source)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    wanted = logits(model, adapted_params(model, params, adapter))
    assert np.abs(wanted - logits(model, params)).max() > 1e-3
    for other in (merged_params(model, params, adapter), adapted_params(model, params, read)):
        np.testing.assert_allclose(logits(model, other), wanted, rtol=0, atol=1e-10)


def test_layers_of_several_ranks_keep_them(tmp_path: Path) -> None:
    """A stack of layers is padded to the largest rank; files have each layer's own."""
    model = base(LLAMA)
    adapter = drawn(model, only=("attention/q",))
    one = adapter.factors["segments/0/0/attention/q"]
    a, b = np.array(one.a), np.array(one.b)
    a[1, ..., 2:], b[1, 2:] = 0, 0
    path = "segments/0/0/attention/q"
    uneven = dataclasses.replace(adapter, factors={path: LowRank(a, b, np.array([0.5, 2.0]))}, ranks={path: (3, 2)})
    write_peft(tmp_path / "one", uneven, model, LLAMA)
    config = json.loads((tmp_path / "one/adapter_config.json").read_text())
    assert config["rank_pattern"] == {"model.layers.1.self_attn.q_proj": 2}
    read = read_peft(tmp_path / "one", model, LLAMA)
    assert read.ranks[path] == (3, 2)
    np.testing.assert_array_equal(read.factors[path].scale, [0.5, 2.0])
    np.testing.assert_array_equal(read.factors[path].a, a)


def test_whole_parameters_are_kept(tmp_path: Path) -> None:
    """``modules_to_save``: whole parameters beside the factors."""
    model = base(LLAMA)
    adapter = dataclasses.replace(drawn(model, only=("q",)), modules={"head/weight": np.ones((32, 16))})
    write_peft(tmp_path / "one", adapter, model, LLAMA)
    read = read_peft(tmp_path / "one", model, LLAMA)
    assert read.settings["modules_to_save"] == ["lm_head"]
    np.testing.assert_array_equal(read.modules["head/weight"], np.ones((32, 16)))
    params = adapted_params(model, model.init(jax.random.key(0)), read)
    assert float(params["head"]["weight"].sum()) == 32 * 16


def damaged(folder: Path, **changes: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def renamed(folder: Path, module: str) -> None:
    """The factors are of another module."""
    file = folder / "adapter_model.safetensors"
    given = {key: np.array(value) for key, value in open_file(file).items()}
    write_file(file, {f"base_model.model.{module}.lora_{key[-8]}.weight": value for key, value in given.items()})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda f: damaged(f, r=0), "the rank r = 0"),
        (lambda f: damaged(f, peft_type="IA3"), "IA3"),
        (lambda f: damaged(f, bias="all"), "bias = 'all'"),
        (lambda f: damaged(f, target_modules=["q_porj"]), "match no module"),
        (lambda f: damaged(f, target_modules=["q_proj", "k_proj"]), "lacks the factors of .*k_proj"),
        (lambda f: damaged(f, target_modules="("), "regular expression"),
        (lambda f: damaged(f, target_parameters=["mlp.experts.up"]), "target_parameters = .* is not supported"),
        (lambda f: renamed(f, "lm_head"), "the target lm_head cannot be adapted here: it is no matmul of a block"),
        (lambda f: damaged(f, r=4), "another base"),
        (lambda f: (f / "adapter_model.safetensors").unlink(), "not written completely"),
        (lambda f: (f / "adapter_config.json").unlink(), "no adapter_config.json"),
        (lambda f: (f / "adapter_model.safetensors").write_bytes(b"x" * 99), "not a safetensors file"),
        (lambda f: (f / "base.json").write_text('{"base": "a", "hash": "float64:other"}'), "another base"),
    ],
)  # fmt: skip
def test_a_damaged_adapter_is_named(tmp_path: Path, change: Any, says: str) -> None:
    model = base(LLAMA)
    write_peft(tmp_path / "one", drawn(model, only=("q",)), model, LLAMA)
    change(tmp_path / "one")
    with pytest.raises(AdapterError, match=says) as error:
        read_peft(tmp_path / "one", model, LLAMA, base_hash="float64:mine")
    assert str(tmp_path / "one") in str(error.value)


def test_an_adapter_of_another_base_is_refused(tmp_path: Path) -> None:
    """Another family's names, and another size's shapes."""
    model = base(LLAMA)
    write_peft(tmp_path / "one", drawn(model), model, LLAMA)
    with pytest.raises(AdapterError, match="gate_proj is unknown"):
        read_peft(tmp_path / "one", base(PHI3), PHI3)
    wider = LLAMA | {"hidden_size": 32}
    with pytest.raises(AdapterError, match="another base"):
        read_peft(tmp_path / "one", base(wider), wider)
    with pytest.raises(AdapterError, match="another base"):
        adapted_params(base(wider), base(wider).abstract(), drawn(model))


def test_targets_are_matched_as_peft_does() -> None:
    """Cases of ``check_target_module_exists`` of peft."""
    names = [f"model.layers.{i}.{m}" for i in range(3) for m in ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj")]
    cases: list[tuple[dict[str, Any], list[int]]] = [
        ({"target_modules": ["q_proj"]}, [0, 3, 6]),
        ({"target_modules": ["proj"]}, []),
        ({"target_modules": "all-linear", "exclude_modules": ["up_proj"]}, [0, 2, 3, 5, 6, 8]),
        ({"target_modules": r".*layers\.[02].*up_proj"}, [1, 7]),
        ({"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]}, [3, 4]),
        ({"target_modules": ["q_proj"], "layers_to_transform": 2, "layers_pattern": "layers"}, [6]),
        ({"target_modules": ["q_proj"], "layers_to_transform": 2, "layers_pattern": "h"}, []),
        ({"target_modules": ["q_proj", "up_proj"], "modules_to_save": ["mlp"]}, [0, 3, 6]),
    ]
    for config, wanted in cases:
        assert module_targets(config, names) == {names[i] for i in wanted}, config
    assert pattern_value({"q_proj": 2, ".*mlp.*": 3}, names[0], 8) == 2
    assert pattern_value({"q_pro": 2}, names[0], 8) == 8


def test_a_file_of_rank_1_is_below_a_hundredth_of_its_base(tmp_path: Path) -> None:
    """Handing over adapters is cheap (MinT, arXiv:2605.13779), for SmolLM2's sizes."""
    source = LLAMA | {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "torch_dtype": "float32",
    }  # fmt: skip
    model = functional(decoder_config(source))
    shapes = {path: factor_shapes(one, 1) for path, one in model.linears().items()}
    factors = {p: LowRank(np.ones(a, np.float32), np.ones(b, np.float32), 1.0) for p, (a, b) in shapes.items()}
    write_peft(tmp_path / "one", Adapter("lora", factors, dict.fromkeys(factors, (1,) * 30)), model, source)
    size = sum(file.stat().st_size for file in (tmp_path / "one").iterdir())
    whole = sum(math.prod(leaf.shape) * 4 for leaf in jax.tree.leaves(model.abstract()))
    exact = sum(a.size + b.size for a, b in ((one.a, one.b) for one in factors.values())) * 4
    assert exact < size < 0.01 * whole
    assert size < exact + 60_000  # names and settings
