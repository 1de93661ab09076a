"""Model inspection: reports on a model's files, complete or broken, without reading a weight."""

from __future__ import annotations

import json
import shutil
from io import StringIO
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

from jaxllm.convert.inspection import group_layers, inspect_model
from jaxllm.convert.inspection_view import show
from jaxllm.hub import HubError, load_hf
from jaxllm.hub.gguf.gguf_file import GgufTensor
from jaxllm.hub.safetensors import open_model, write_model
from jaxllm.infer import load_model
from jaxllm.models import param_count
from jaxllm.text import ByteTokenizer, ChatTemplate
from tests.hub import gguf_writer, peers
from tests.hub.test_gguf_models import MODELS, entry
from tests.hub.test_huggingface import reconfigure, rewrite


def text(found: Any, *, terminal: bool = False, every: bool = False) -> str:
    out = StringIO()
    show(found, every=every, console=Console(file=out, force_terminal=terminal, width=100 if terminal else None))
    return out.getvalue()


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("family", peers.FAMILIES | peers.MIXTURES)
def test_every_tensor_has_its_parameter(family: str, tmp_path: Path) -> None:
    folder = peers.peer(family, 1).save(tmp_path / "model")
    found, loaded = inspect_model(folder), load_hf(folder)
    assert found.findings == []
    assert found.config == loaded.config
    assert found.parameters == param_count(loaded.params)
    assert found.bytes == sum(array.nbytes for array in open_model(folder).values())
    named = {part.split("[")[0] for tensor in found.tensors for part in tensor.ours.split(", ")}
    leaves = jax.tree_util.tree_leaves_with_path(loaded.params)
    assert named == {jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves}
    assert sum(count for _, count in group_layers(found.tensors)) == len(found.tensors)
    assert json.loads(json.dumps(found.to_json()))["tensors"][0]["shape"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A Gemma 2 with words, in shards."""
    folder = peers.peer("gemma2", 2).save(tmp_path / "plain")
    tensors, config = dict(open_model(folder)), (folder / "config.json").read_text()
    write_model(tmp_path / "model", tensors, {"config.json": config}, 2500)
    ChatTemplate("{# a #}\n{{ messages }}\n" + "line\n" * 9).save(tmp_path / "model")
    return tmp_path / "model"


def test_what_is_shown(model: Path) -> None:
    found = inspect_model(model)
    assert len(list(model.glob("*.safetensors"))) > 2
    short, whole, coloured = text(found), text(found, every=True), text(found, terminal=True)
    config = found.config
    assert config is not None
    for words in (
        "gemma2",
        f"{found.parameters:,} parameters",
        f"{config.layers} of width {config.embed_dim}; vocabulary 40",
        f"window = {min(b.attention.window or 99 for b in config.blocks)}",
        "norms = sandwich",
        "norm = rms_plus_one",
        "activation = gelu_tanh",
        "float32, 0.0 MiB, or with --dtype bfloat16",
        "model.layers.*.self_attn.q_proj.weight",
        "{{ messages }}",
        "... 7 more lines",
        "tokenizer",
    ):
        assert words in short, words
        assert words.split()[0] in coloured
    assert "findings" not in short
    assert "\x1b" not in short
    assert "\x1b" in coloured
    assert "model.layers.0.self_attn.q_proj.weight" in whole
    assert "more lines" not in whole
    assert len(whole.splitlines()) > len(short.splitlines()) + 5


def test_a_run(finished: Path) -> None:
    found = inspect_model(finished / "runs" / "tiny")
    assert found.findings == []
    assert (found.format, found.family) == ("jaxllm run", "llama")
    assert found.config == load_model(finished / "runs" / "tiny").model.config
    assert found.tokenizer is not None
    assert (found.tokenizer["kind"], found.tokenizer["vocab_size"]) == ("bytes", ByteTokenizer().vocab_size)
    said = text(found)
    assert "Step 12 is read (there: 4, 8, 12)" in said
    assert "are for training and are not read" in said
    assert "bytes, 272 tokens, 16 of them special; texts begin with <|bos|>; generation ends at <|eos|> (257)" in said


def test_a_run_that_has_not_saved(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    assert "no finished checkpoint yet" in inspect_model(tmp_path).findings[0]
    text(inspect_model(tmp_path))


def test_a_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = gguf_writer.write(
        gguf_writer.save(MODELS["llama3"], tmp_path / "theirs"), tmp_path / "m.gguf", gguf_writer.Ggml.F16
    )

    def read(*_: Any) -> None:
        raise AssertionError("a weight was read")

    whole = GgufTensor.__array__
    monkeypatch.setattr(GgufTensor, "__getitem__", read)
    monkeypatch.setattr(
        GgufTensor, "__array__", lambda t, *args: whole(t, *args) if t.name == "rope_freqs.weight" else read()
    )
    found = inspect_model(file)
    assert found.findings == []
    ours = {t.name: (t.kind, t.ours) for t in found.tensors}
    assert ours["blk.1.attn_q.weight"] == ("F16", "segments/0/0/attention/q[1]")
    assert ours["rope_freqs.weight"] == ("F32", "read into the config")
    assert found.bytes == sum(t.bytes for t in found.tensors)
    assert "rotary: theta = 500000.0, scaling = Llama3Scaling" in text(found)
    assert found.tokenizer is None


def drop_shard(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[-1].unlink()


def cut_shard(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:-3])


def too_many_tokens(folder: Path) -> None:
    ByteTokenizer().save(folder)


@pytest.mark.parametrize(
    ("damage", "finding", "shown"),
    [
        (drop_shard, "lacks the shard model-0", "embedding/table"),
        (cut_shard, "is cut short", "embedding/table"),
        (lambda d: reconfigure(d, model_type="gemma9"), "Did you mean 'gemma2'", "not known"),
        (lambda d: reconfigure(d, new_trick=1), "'new_trick' = 1, which is not understood", "not known"),
        (lambda d: reconfigure(d, intermediate_size=99), "the config asks for", "embedding/table"),
        (lambda d: (d / "config.json").write_text("[]"), "is not a JSON object", "not known"),
        (lambda d: (d / "config.json").unlink(), "has no config.json", "not known"),
        (too_many_tokens, "the tokenizer has 272 tokens, the embedding 40 rows", "embedding/table"),
        (lambda d: (d / "tokenizer.json").write_text("{"), "not a tokenizer.json", "embedding/table"),
        (lambda d: (d / "model.safetensors.index.json").write_text("{"), "is damaged", "gemma2"),
    ],
)
def test_what_is_wrong_is_found_and_the_rest_is_shown(model: Path, damage: Any, finding: str, shown: str) -> None:
    damage(model)
    found = inspect_model(model)
    assert finding in " ".join(found.findings)
    said = text(found)
    assert finding in said
    assert shown in said
    json.dumps(found.to_json())


def test_a_damaged_gguf(tmp_path: Path) -> None:
    change = entry("llama.logit_scale", 0.5)
    source = gguf_writer.save(MODELS["llama_tied"], tmp_path / "theirs")
    odd = inspect_model(gguf_writer.write(source, tmp_path / "odd.gguf", change=change))
    assert "logit_scale = 0.5; this entry is not understood" in odd.findings[0]
    assert {t.ours for t in odd.tensors} == {"not known"}
    assert odd.parameters == sum(np.prod(t.shape) for t in odd.tensors)
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "odd.gguf").read_bytes()[:300])
    assert "is cut short" in inspect_model(tmp_path / "cut.gguf").findings[0]
    text(inspect_model(tmp_path / "cut.gguf"))


def test_tensors_that_no_parameter_is_made_of(tmp_path: Path) -> None:
    folder = peers.peer("smollm2", 0).save(tmp_path / "model")

    def change(tensors: dict[str, Any]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.arange(4, dtype=np.float32)

    rewrite(folder, change)
    found = inspect_model(folder)
    assert found.findings == []
    ours = {t.name: t.ours for t in found.tensors}
    assert ours["lm_head.weight"] == "the same as model.embed_tokens.weight"
    assert ours["model.layers.0.self_attn.rotary_emb.inv_freq"] == "carried to an export"
    rewrite(folder, lambda tensors: tensors.update({"extra.scale": np.ones(1, np.float32)}))
    found = inspect_model(folder)
    assert "not used: extra.scale (1 in all)." in found.findings
    assert {t.name: t.ours for t in found.tensors}["extra.scale"] == "not used"


def test_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(HubError, match="there is no"):
        inspect_model(tmp_path / "nothing")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(HubError, match="pickle files can run any code"):
        inspect_model(tmp_path / "pytorch_model.bin")
    found = inspect_model(tmp_path)
    assert "has no config.json" in found.findings[0]
    assert "pickle files can run any code" in found.findings[1]


def test_a_run_without_its_tokenizer(copied: Path) -> None:
    shutil.rmtree(copied / "tokenizer")
    assert "no tokenizer here" in " ".join(inspect_model(copied).findings)
