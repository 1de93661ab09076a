"""Model conversion: the same bytes back, opened by the target format's loader, in little memory."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxllm.checkpoint import CheckpointCorruptError, Checkpointer
from jaxllm.convert.convert import convert, copy_tokenizer_files
from jaxllm.files import DataError
from jaxllm.hub import HubError, load_gguf, load_hf
from jaxllm.hub.safetensors import open_model, write_model
from jaxllm.infer import load_model
from jaxllm.text import ByteTokenizer, ChatTemplate, load_template, load_tokenizer
from tests import environment, quick, tiny
from tests.hub import gguf_writer, peers
from tests.hub.test_gguf_models import MODELS
from tests.hub.test_huggingface import rewrite, same_files


def theirs(directory: Path) -> Any:
    """transformers' model of a directory."""
    load = peers.transformers.AutoModelForCausalLM.from_pretrained
    return load(directory, attn_implementation="eager", dtype="auto").eval()


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("family", peers.FAMILIES | peers.MIXTURES)
def test_there_and_back_is_the_same(family: str, tmp_path: Path) -> None:
    before = peers.peer(family, 3).save(tmp_path / "before")
    made = convert(before, tmp_path / "ours", "jaxllm")
    assert (made.path, made.dtype, made.has_tokenizer) == (tmp_path / "ours", "float32", False)
    convert(tmp_path / "ours", tmp_path / "after", "hf", shard_bytes=3000)
    assert len(list((tmp_path / "after").glob("*.safetensors"))) > 1
    same_files(before, tmp_path / "after")
    convert(before, tmp_path / "copy", "hf")
    same_files(before, tmp_path / "copy")
    with Checkpointer(tmp_path / "ours" / "checkpoints", read_only=True) as checkpointer:
        params, meta = checkpointer.restore_params(load_hf(before).params)
        checkpointer.verify()
    jax.tree.map(np.testing.assert_array_equal, params, load_hf(before).params)
    assert meta["source"] == json.loads((before / "config.json").read_text())


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A model with a tokenizer, a template, and what else lies about."""
    folder = tmp_path / "llama"
    config = peers.transformers.LlamaConfig(
        hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2, vocab_size=280, eos_token_id=7
    )
    peers.transformers.LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    ByteTokenizer().save(folder)
    ChatTemplate("{{ messages[0].content }}!").save(folder)
    ChatTemplate({"tool_use": "tools"}).save(folder)
    (folder / "special_tokens_map.json").write_text("{}")
    (folder / "modeling_llama.py").write_text("raise SystemExit('code that is not ours')")
    return folder


def test_words_come_along_and_code_does_not(llama: Path, tmp_path: Path) -> None:
    convert(llama, tmp_path / "ours", "jaxllm")
    convert(tmp_path / "ours", tmp_path / "after", "hf")
    for folder in (tmp_path / "ours" / "tokenizer", tmp_path / "after"):
        assert load_tokenizer(folder).fingerprint == ByteTokenizer().fingerprint
        template = load_template(folder)
        assert template is not None
        assert template.render([{"role": "user", "content": "hi"}]) == "hi!"
        assert set(template.sources) == {"default", "tool_use"}
        assert (folder / "special_tokens_map.json").read_text() == "{}"
        assert not list(folder.glob("*.py"))
    loaded, from_hf = load_model(tmp_path / "ours"), load_model(llama)
    assert (loaded.step, loaded.longest) == (0, from_hf.longest)
    assert loaded.model.config == from_hf.model.config
    assert loaded.template is not None
    jax.tree.map(np.testing.assert_array_equal, loaded.params, from_hf.params)


@pytest.mark.drawn(0.3)
def test_a_run_opens_in_transformers(finished: Path, tmp_path: Path) -> None:
    run = finished / "runs" / "tiny"
    made = convert(run, tmp_path / "out", "hf")
    assert made.has_tokenizer
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["max_position_embeddings"], config["dtype"]) == ("llama", 16, "float32")
    loaded = load_model(run)
    assert config["eos_token_id"] == loaded.tokenizer.eos_id
    tokens = np.arange(4, 36, dtype=np.int32).reshape(2, 16)
    want = quick.logits(loaded.model.config, loaded.params, tokens)
    assert tiny.leaf_error(peers.logits_of(theirs(tmp_path / "out"), tokens), want) < 1e-5
    tokenizer = peers.transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("the cat", add_special_tokens=False).input_ids == loaded.tokenizer.encode("the cat").tolist()
    again = load_model(tmp_path / "out")
    jax.tree.map(np.testing.assert_array_equal, again.params, loaded.params)
    assert again.tokenizer.fingerprint == loaded.tokenizer.fingerprint


def test_a_run_without_its_optimizer(finished: Path, tmp_path: Path) -> None:
    run = finished / "runs" / "tiny"
    convert(run, tmp_path / "small", "jaxllm", step=4, dtype="bfloat16")
    small, whole = load_model(tmp_path / "small"), load_model(run, step=4)
    assert small.model.config.param_dtype == small.model.config.dtype == "bfloat16"
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype("bfloat16")), small.params, whole.params)
    assert small.meta["tokenizer"] == whole.meta["tokenizer"]
    assert small.source is not None
    assert small.source["model_type"] == "llama"
    with pytest.raises(HubError, match="is not a run's directory, so it has no step 4"):
        convert(peers.peer("llama", 0).save(tmp_path / "hf"), tmp_path / "x", "hf", step=4)


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize(
    ("name", "by_way_of_ours"),
    [
        *((name, False) for name in ("llama_tied", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")),
        *((name, True) for name in ("llama_tied", "gemma3")),
    ],
)
def test_gguf_opens_in_transformers(name: str, by_way_of_ours: bool, tmp_path: Path) -> None:
    """Two models go by way of our format; every family does in ``test_there_and_back_is_the_same``."""
    source = gguf_writer.save(MODELS[name], tmp_path / "theirs")
    file = gguf_writer.write(source, tmp_path / "m.gguf")
    if by_way_of_ours:
        convert(file, tmp_path / "ours", "jaxllm")
    convert(tmp_path / "ours" if by_way_of_ours else file, tmp_path / "out", "hf")
    loaded = load_gguf(file)
    tokens = np.arange(40, dtype=np.int32).reshape(2, 20)
    want = quick.logits(loaded.config, loaded.params, tokens)
    assert tiny.leaf_error(peers.logits_of(theirs(tmp_path / "out"), tokens), want) < 1e-5


@pytest.mark.drawn(0.3)
def test_types(tmp_path: Path) -> None:
    before = peers.peer("gemma2", 0).save(tmp_path / "before")
    original = dict(open_model(before))
    for dtype in ("bfloat16", "float16", "float32"):
        made = convert(before, tmp_path / dtype, "hf", dtype=dtype)  # type: ignore[arg-type]
        assert made.dtype == dtype
        for name, array in open_model(tmp_path / dtype).items():
            assert array.tobytes() == original[name].astype(dtype).tobytes()
        assert json.loads((tmp_path / dtype / "config.json").read_text())["dtype"] == dtype
    for dtype, ours in (("bfloat16", "bfloat16"), ("float16", "float32")):
        assert convert(tmp_path / dtype, tmp_path / f"{dtype}_ours", "jaxllm").dtype == ours
        convert(tmp_path / f"{dtype}_ours", tmp_path / f"{dtype}_back", "hf")
    same_files(tmp_path / "bfloat16", tmp_path / "bfloat16_back")
    for name, array in open_model(tmp_path / "float16_back").items():
        np.testing.assert_array_equal(array, original[name].astype(np.float16).astype(np.float32))
    with pytest.raises(HubError, match="parameters cannot be float16; legal: float32, bfloat16"):
        convert(before, tmp_path / "x", "jaxllm", dtype="float16")


def test_weights_of_several_types_keep_their_values(tmp_path: Path) -> None:
    before = peers.peer("llama", 0).save(tmp_path / "before")
    halve = {n: a.astype(ml_dtypes.bfloat16) for n, a in open_model(before).items() if "norm" not in n}
    rewrite(before, lambda tensors: tensors.update(halve))
    assert convert(before, tmp_path / "ours", "jaxllm").dtype == "float32"
    jax.tree.map(
        np.testing.assert_array_equal, load_hf(before).params, load_hf_of(tmp_path / "ours", tmp_path / "back")
    )
    convert(before, tmp_path / "copy", "hf")
    same_files(before, tmp_path / "copy")


def load_hf_of(ours: Path, out: Path) -> Any:
    convert(ours, out, "hf")
    return load_hf(out).params


def test_what_is_not_learned_comes_back(tmp_path: Path) -> None:
    """An inverse frequency, a tied head saved twice, names without their prefix."""
    before = peers.peer("smollm2", 0).save(tmp_path / "before")

    def change(tensors: dict[str, Any]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.arange(4, dtype=np.float32)

    rewrite(before, change)
    gpt2 = peers.peer("gpt2", 0).save(tmp_path / "gpt2")

    def strip(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = np.tril(np.ones((1, 1, 8, 8), bool))

    rewrite(gpt2, strip)
    for model in (before, gpt2):
        convert(model, tmp_path / f"{model.name}_ours", "jaxllm")
        convert(tmp_path / f"{model.name}_ours", tmp_path / f"{model.name}_back", "hf")
        same_files(model, tmp_path / f"{model.name}_back")


def spoil(folder: Path, value: float) -> None:
    rewrite(folder, lambda t: t["model.layers.2.mlp.down_proj.weight"].__setitem__((0, 0), value))


@pytest.mark.parametrize("to", ["hf", "jaxllm"])
@pytest.mark.parametrize(
    ("damage", "kind", "message"),
    [
        (lambda d: spoil(d, np.nan), HubError, r"down.* not finite; the file is damaged"),
        (lambda d: (d / "model.safetensors").unlink(), HubError, "neither model.safetensors nor"),
        (lambda d: rewrite(d, lambda t: t.pop("model.norm.weight")), HubError, "missing: model.norm.weight"),
        (lambda d: (d / "tokenizer.json").write_text("{"), DataError, "tokenizer.json"),
    ],
    ids=["nan", "missing_file", "missing_tensor", "tokenizer"],
)
def test_what_fails_leaves_nothing(to: Any, damage: Any, kind: type, message: str, tmp_path: Path) -> None:
    before = peers.peer("llama", 0).save(tmp_path / "in" / "before")
    damage(before)
    if kind is DataError and to == "hf":
        return  # the tokenizer's files are copied, whatever they are
    with pytest.raises(kind, match=message):
        convert(before, tmp_path / "in" / "out", to)
    assert [p.name for p in (tmp_path / "in").iterdir()] == ["before"]


def test_values_beyond_a_types_range_are_named(tmp_path: Path) -> None:
    before = peers.peer("llama", 0).save(tmp_path / "before")
    spoil(before, 1e6)
    with pytest.raises(HubError, match=r"down_proj.weight has values beyond the range of float16"):
        convert(before, tmp_path / "out", "hf", dtype="float16")
    assert not (tmp_path / "out").exists()


def test_what_exists_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(HubError, match=r"out exists; choose another name"):
        convert(tmp_path / "nothing", tmp_path / "out", "hf")
    with pytest.raises(HubError, match="nothing cannot be read"):
        convert(tmp_path / "nothing", tmp_path / "new", "hf")


def test_a_damaged_run_is_refused(copied: Path, tmp_path: Path) -> None:
    folder = copied / "checkpoints" / "step_00000012" / "state" / "params.embedding.table"
    file = next(f for f in folder.iterdir() if f.name != ".zarray")
    data = bytearray(file.read_bytes())
    data[9] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointCorruptError, match="embedding/table"):
        convert(copied, tmp_path / "out", "hf")
    convert(copied, tmp_path / "out", "hf", step=8)


def test_only_known_files_are_copied(tmp_path: Path) -> None:
    folder = tmp_path / "from"
    (folder / "additional_chat_templates").mkdir(parents=True)
    for name in ("tokenizer.json", "qwen.tiktoken", "pytorch_model.bin", "run.py", "additional_chat_templates/a.jinja"):
        (folder / name).write_text(name)
    copy_tokenizer_files(folder, tmp_path / "to")
    found = {str(f.relative_to(tmp_path / "to")) for f in (tmp_path / "to").rglob("*") if f.is_file()}
    assert found == {"tokenizer.json", "qwen.tiktoken", "additional_chat_templates/a.jinja"}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of about 130 MB, of random bytes that are finite."""
    config = peers.transformers.LlamaConfig(
        hidden_size=512, intermediate_size=1536, num_hidden_layers=10, num_attention_heads=8, vocab_size=2000
    )
    with peers.torch.device("meta"):
        shapes = {n: tuple(t.shape) for n, t in peers.transformers.LlamaForCausalLM(config).state_dict().items()}
    rng = np.random.default_rng(0)
    tensors = {name: rng.random(shape, np.float32) for name, shape in shapes.items()}
    folder = tmp_path_factory.mktemp("large") / "model"
    write_model(folder, tensors, {"config.json": config.to_json_string()}, 2**25)
    return folder


PEAK = """
import sys
import jax.numpy as jnp
from jaxllm.convert.convert import convert
import jaxllm.checkpoint.checkpoint_writer, orbax.checkpoint

def memory(field):
    return 1024 * next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))

jnp.zeros(1).block_until_ready()
before = memory("VmRSS")
made = convert(*sys.argv[1:])
print(made.bytes, (memory("VmHWM") - before) / made.bytes)
"""


@pytest.mark.drawn(0.3)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_large_model_is_never_in_memory(large: Path, tmp_path: Path) -> None:
    def peak(*argv: Any) -> float:
        command = [sys.executable, "-c", PEAK, *map(str, argv)]
        out = subprocess.run(command, capture_output=True, text=True, check=True, cwd=environment.ROOT).stdout
        size, ratio = out.split()
        assert int(size) > 1.2e8
        return float(ratio)

    assert peak(large, tmp_path / "ours", "jaxllm") < 0.25
    assert peak(tmp_path / "ours", tmp_path / "back", "hf") < 0.25
    assert peak(large, tmp_path / "copy", "hf") < 0.25
    same_files(large, tmp_path / "back")


@pytest.mark.drawn(0.3)
def test_ctrl_c_leaves_nothing(large: Path, tmp_path: Path) -> None:
    code = (
        # A process started in the background of a script ignores the signal until told otherwise.
        "import signal, sys, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from jaxllm.convert.convert import convert\n"
        "def slowly(what, done, total):\n    print(done, flush=True)\n    time.sleep(0.2)\n"
        "convert(sys.argv[1], sys.argv[2], sys.argv[3], progress=slowly)\n"
    )
    for to in ("hf", "jaxllm"):
        process = subprocess.Popen(
            [sys.executable, "-c", code, large, tmp_path / "out", to],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=environment.ROOT, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                if line.strip() == "3":
                    break
            assert len(list(tmp_path.iterdir())) == 1, "the temporary directory"
            process.send_signal(signal.SIGINT)
            process.wait(timeout=60)
        assert process.returncode != 0
        assert list(tmp_path.iterdir()) == []
