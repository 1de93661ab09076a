"""`jaxllm generate` and `jaxllm chat` on Hugging Face and GGUF models."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm import cli
from jaxllm.files import DataError
from jaxllm.hub import HubError, HubModel, decoder_config, export_hf, find_model
from jaxllm.infer import LLM, Chat, EngineConfig, ModelNotFoundError, SamplingParams, load_model, single_user_config
from jaxllm.infer.streaming.offload_budget import OffloadBudget
from jaxllm.infer.streaming.tier_rates import TierRates
from jaxllm.text import ByteTokenizer
from tests import quick

SOURCE = {
    "model_type": "qwen2",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "vocab_size": 272,
}
TEMPLATE = (
    "{% for m in messages %}{{ '<|bos|>' if m.role == 'user' else '' }}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(autouse=True)
def compiled_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "jit", quick.jit)


def save(directory: Path, template: str = "", **fields: Any) -> str:
    source = SOURCE | fields
    config = decoder_config(source)
    export_hf(HubModel(config, quick.params(config), source), directory)
    ByteTokenizer().save(directory)
    if template:
        (directory / "chat_template.jinja").write_text(template)
    return str(directory)


@pytest.mark.drawn(0.3)
def test_generate_writes_with_a_model_from_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model = save(tmp_path / "model")
    assert cli.main(["generate", model, "--prompt", "Hello", "--max-tokens", "4"]) == 0
    assert capsys.readouterr().out.startswith("Hello")
    assert cli.main(["eval", model]) == 2
    assert "was not trained with jaxllm" in capsys.readouterr().err
    assert cli.main(["chat", model, "--message", "Hi"]) == 2
    assert "no chat template" in capsys.readouterr().err


@pytest.mark.drawn(0.3)
def test_a_streamed_model_writes_the_same(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """From its files, layer by layer; with layers in files of the cache, plain and in int8."""
    model = save(tmp_path / "model", intermediate_size=32)
    command = ["generate", model, "--prompt", "Hello", "--max-tokens", "6", "--temperature", "0"]
    for weights in ([], ["--weights", "int8"]):
        said = []
        for offload in ([], ["--offload", "window=1"], ["--offload", f"device=5KiB,disk={tmp_path / 'layers'}"]):
            assert cli.main([*command, *weights, *offload]) == 0
            said.append(capsys.readouterr().out)
        assert said[0].startswith("Hello")
        assert said == [said[0]] * 3
    assert len(list((tmp_path / "layers").iterdir())) == 2
    for wrong in ("window=0", "host=4GiB", "disc=layers", "window=2,window=3"):
        assert cli.main([*command, "--offload", wrong]) == 2
        assert "--offload" in capsys.readouterr().err
    assert cli.main([*command, "--offload", "window=2,experts=1", "--mesh", "tensor=8"]) == 2
    assert "leave --mesh out" in capsys.readouterr().err


MIXTURE = {
    "model_type": "qwen3_moe", "head_dim": 4, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


@pytest.mark.drawn(0.5)
def test_a_mixture_is_placed_with_its_experts_in_slots(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Measured, solved, written: where whole layers would wait for the host, experts get slots; the text stays."""
    model, rates = save(tmp_path / "model", **MIXTURE), tmp_path / "measured" / "rates.json"
    whole = ("--tiers-disk", str(tmp_path / "disk" / "here"), "--batches", "1", "2", "--prompt", "4")
    assert cli.main(["bench", model, "--tiers", str(rates), *whole]) == 0
    assert "25% files" in capsys.readouterr().out
    measured = TierRates.read(rates)
    slots = measured.slots
    assert slots is not None
    assert slots.shares == (0.25, 0.5, 1.0)
    ways = (slots.host, slots.host_late, slots.files, slots.files_late)
    assert [len(row) for way in ways for row in way] == [2] * 12
    assert {way[-1] for way in ways} == {slots.host[-1]}
    assert len({way[:2] for way in ways}) == 4
    # A link so slow that only bytes count: the most slots that fit beside the rest of the layers.
    dataclasses.replace(
        measured, host=1e3, disk=(1e3,), disk_cold=(), slowdowns=(), disk_shares=(), slots=None,
    ).write(rates)  # fmt: skip
    command = ["generate", model, "--prompt", "Hello", "--max-tokens", "6", "--temperature", "0"]
    said = []
    limits = f"fit,device=130KiB,length=64,prompt=8,rates={rates}"
    for offload in (
        (),
        ("--offload", f"{limits},host=1MiB"),
        ("--offload", f"{limits},host=20KiB,disk={tmp_path / 'd'}"),
    ):
        assert cli.main([*command, *offload]) == 0
        out, err = capsys.readouterr()
        said.append(out)
        if offload:
            assert "requests of 8 + 56 tokens, steps of at most 64:" in err  # one user's on a CPU
            chosen = OffloadBudget.parse(err.partition("chosen for batches of 1: --offload ")[2].split()[0])
            assert 1 <= chosen.experts < 4
            assert (chosen.experts_host is None) == ("disk" not in offload[1])
            assert f"; {chosen.experts} experts of each mixture, the others" in err
    assert said[0].startswith("Hello")
    assert said == [said[0]] * 3
    # int8 has a quarter of the bytes: of the two formats it is the one that is fast over such a link.
    assert (
        cli.main([*command, "--offload", f"fit,device=112KiB,host=1MiB,length=64,formats=plain+int8,rates={rates}"])
        == 2
    )
    assert "of one format" in capsys.readouterr().err
    for weights in ("plain", "int8"):
        TierRates.read(rates).write(tmp_path / f"rates-{weights}.json")
    formats = f"device=82KiB,host=1MiB,length=64,formats=plain+int8,rates={tmp_path}/rates-{{}}.json"
    assert cli.main([*command, "--kv-format", "int8", "--offload", f"fit,{formats}"]) == 0
    out, err = capsys.readouterr()
    assert "chosen: --weights int8 --offload " in err
    assert cli.main([*command, "--kv-format", "int8", "--weights", "int8"]) == 0
    assert capsys.readouterr().out == out
    assert cli.main([*command, "--weights", "int8", "--offload", f"fit,{formats}"]) == 2
    assert "leave one out" in capsys.readouterr().err


@pytest.mark.drawn(1)
def test_a_streamed_model_is_scored_and_timed(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model, task = save(tmp_path / "model", intermediate_size=32), tmp_path / "task.jsonl"
    task.write_text('{"prompt": "The", "choices": [" sea", " land"], "answer": 0}\n')
    streamed = ["--offload", f"window=1,device=5KiB,host=0B,disk={tmp_path / 'layers'}"]
    scores = []
    for offload in ([], streamed):
        assert cli.main(["eval", model, "--tasks", str(task), "--max-len", "32", *offload]) == 0
        scores.append(capsys.readouterr().out)
    assert scores[0] == scores[1]
    assert "task: 1 rows, acc" in scores[0]
    sizes = ["--batches", "2", "--prompt", "8", "--tokens", "4", "--rounds", "1"]
    assert cli.main(["bench", model, *sizes, *streamed]) == 0
    said = capsys.readouterr().out
    assert "tokens/s decoding" in said
    assert "roofline" not in said
    for command in (["eval", model], ["eval", model, "--original", model], ["bench", model, "--layers", "apart"]):
        assert cli.main([*command, *streamed]) == 2
        assert "--offload" in capsys.readouterr().err


def test_a_tokenizer_that_is_too_large_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="272 tokens, but the model's embedding has 100 rows"):
        load_model(save(tmp_path / "model", vocab_size=100))


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no checkpoints/.*safetensors.*\.gguf"):
        load_model(tmp_path)
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(HubError, match="pickle files can run any code"):
        load_model(tmp_path / "model.bin")
    (tmp_path / "model.txt").write_text("hello")
    with pytest.raises(HubError, match=r"model.txt"):
        load_model(tmp_path / "model.txt")


def test_what_is_wrong_with_a_model_is_said_by_every_command(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SOURCE))
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(HubError, match="pickle files can run any code"):
        load_model(tmp_path)
    with pytest.raises(HubError, match=r"is a part of a model; give its directory"):
        load_model(tmp_path / "config.json")
    with pytest.raises(HubError, match=r"there is no smolm2. Did you mean 'smollm2'"):
        load_model("smolm2")
    (tmp_path / "config.json").unlink()
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(HubError, match=r"several GGUF files; name one: a.gguf, b.gguf"):
        load_model(tmp_path)


def test_a_run_has_a_dtype_of_its_own(finished: Path) -> None:
    load_model(finished / "runs" / "tiny", dtype="float32")
    with pytest.raises(ModelNotFoundError, match="a model in float32, and none in bfloat16"):
        load_model(finished / "runs" / "tiny", dtype="bfloat16")


def test_a_hub_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(HubError, match=r"hf:some/model: .* pip install 'jaxllm\[hf\]'"):
        find_model("hf:some/model")


@pytest.mark.drawn(0.3)
def test_the_conversation_is_what_the_template_makes_of_it(tmp_path: Path) -> None:
    """Each answer follows the whole conversation; the template's special tokens are tokens, and a message's never."""
    chat = Chat(load_model(save(tmp_path / "model", TEMPLATE)), [{"role": "system", "content": "S"}], max_tokens=6)
    first = "".join(chat.say("one"))
    assert chat.messages[1:] == [{"role": "user", "content": "one"}, {"role": "assistant", "content": first}]
    ids = chat.tokens([*chat.messages, {"role": "user", "content": "<|bos|>"}])
    parts = f"system:S\n<|bos|>user:one\nassistant:{first}\n<|bos|>user:", "<|bos|>", "\nassistant:"
    tokenizer = ByteTokenizer()
    wanted = [tokenizer.encode(part, specials=n != 1).tolist() for n, part in enumerate(parts)]
    assert ids == [*wanted[0], *wanted[1], *wanted[2]]
    assert ids.count(256) == 2
    asked = list(chat.say("two"))
    assert len(chat.messages) == 5
    assert chat.messages[-1]["content"] == "".join(asked)


@pytest.mark.drawn(3)
def test_an_answer_that_is_stopped_is_kept_as_far_as_it_came(tmp_path: Path) -> None:
    chat = Chat(load_model(save(tmp_path / "model", TEMPLATE)), max_tokens=40, temperature=0.0)
    whole = list(chat.say("one"))
    assert len(whole) > 1
    chat.messages.clear()
    answer = chat.say("one")
    piece = next(answer)
    answer.close()
    assert chat.messages == [{"role": "user", "content": "one"}, {"role": "assistant", "content": piece}]


def test_a_conversation_that_is_too_long_is_refused_and_forgotten(tmp_path: Path) -> None:
    chat = Chat(load_model(save(tmp_path / "model", TEMPLATE, max_position_embeddings=40)), max_tokens=500)
    assert sum(len(piece.encode()) for piece in chat.say("hello")) <= 40
    chat.messages.clear()
    with pytest.raises(DataError, match="has 71 tokens, and the model reads 40 at most"):
        list(chat.say("x" * 54))
    assert chat.messages == []


def test_chat_reads_lines(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save(tmp_path / "model", TEMPLATE)
    settings = ["--max-tokens", "3", "--temperature", "0"]
    typed = Typed("one\n\n/what\n/clear\none\n/exit\nnever\n")
    monkeypatch.setattr("sys.stdin", typed)
    assert cli.main(["chat", model, *settings]) == 0
    out, err = capsys.readouterr()
    assert "unknown command /what" in err
    lines = out.replace("> ", "").splitlines()[1:]
    assert cli.main(["chat", model, "--message", "one", *settings]) == 0
    answer = capsys.readouterr().out.splitlines()
    assert lines == answer * 2, "cleared, the second answer is the first again; nothing follows /exit"
    assert typed.read() == "never\n"


class Typed(io.StringIO):
    """Lines that somebody types at a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_piped_line_may_begin_with_a_slash(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save(tmp_path / "model", TEMPLATE)
    settings = ["--max-tokens", "3", "--temperature", "0"]
    monkeypatch.setattr("sys.stdin", io.StringIO("/etc/passwd is what?\n/exit\n"))
    assert cli.main(["chat", model, *settings]) == 0
    out, err = capsys.readouterr()
    assert "no command" not in err
    assert cli.main(["chat", model, "--message", "/etc/passwd is what?", *settings]) == 0
    assert out == capsys.readouterr().out


@pytest.mark.parametrize(("stdin", "status"), [(Typed, 0), (io.StringIO, 2)])
def test_a_message_that_is_too_long_does_not_end_the_chat(
    stdin: type, status: int, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save(tmp_path / "model", TEMPLATE, max_position_embeddings=40)
    settings = ["--max-tokens", "3", "--temperature", "0"]
    long = "x" * 60
    monkeypatch.setattr("sys.stdin", stdin(f"{long}\n/clear\none\n"))
    assert cli.main(["chat", model, *settings]) == status
    out, err = capsys.readouterr()
    assert err.count("error: the conversation has 77 tokens") == 1
    assert cli.main(["chat", model, "--message", "one", *settings]) == 0
    assert capsys.readouterr().out in out
    assert cli.main(["chat", model, "--message", long, *settings]) == 2
    assert "error: the conversation has 77 tokens" in capsys.readouterr().err


def test_a_chat_of_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model = save(tmp_path / "model", TEMPLATE)
    assert cli.main(["chat", model, "--message", "a", "--max-tokens", "0"]) == 2
    assert "max_tokens = 0; give 1 or more" in capsys.readouterr().err
    (tmp_path / "model" / "chat_template.jinja").write_text("{% if false %}x{% endif %}")
    assert cli.main(["chat", model, "--message", "a"]) == 2
    assert "the template renders this conversation as an empty prompt" in capsys.readouterr().err


def test_more_tokens_than_learned_positions_are_refused(tmp_path: Path) -> None:
    fields = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": 272, "layer_norm_epsilon": 1e-5}
    source = {"model_type": "gpt2", "activation_function": "gelu_new", **fields}
    config = decoder_config(source)
    export_hf(HubModel(config, quick.params(config), source), tmp_path / "model")
    ByteTokenizer().save(tmp_path / "model")
    loaded = load_model(tmp_path / "model")
    assert loaded.longest == 16
    llm = LLM(loaded, single_user_config(loaded, 16), manifest=None)
    (made,) = llm.generate([1, 2, 3], SamplingParams(max_tokens=13, ignore_eos=True))
    assert len(made.outputs[0].tokens) == 13
    with pytest.raises(ValueError, match="3 tokens of prompt and 14 new ones are 17; this engine's sequences have 16"):
        llm.generate([1, 2, 3], SamplingParams(max_tokens=14))
    with pytest.raises(ValueError, match="max_len = 17, but the model has learned positions for 16"):
        LLM(loaded, EngineConfig(max_len=17), manifest=None)


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("rope", [{"rope_type": "dynamic", "factor": 4.0}, {"rope_type": "longrope"}], ids=str)
def test_padding_to_a_bucket_does_not_lengthen_a_prompt(tmp_path: Path, rope: dict[str, Any]) -> None:
    """Rotary scalings look at a sequence's length: that of the prompt, not of the program that reads it."""
    factors = {"short_factor": [1.0, 1.0], "long_factor": [3.0, 9.0]} if rope["rope_type"] == "longrope" else {}
    rope = rope | factors | {"rope_theta": 100.0}
    loaded = load_model(save(tmp_path / "model", rope_parameters=rope, max_position_embeddings=12))
    plain = load_model(save(tmp_path / "plain", rope_parameters={"rope_theta": 100.0}))
    prompt = np.random.default_rng(0).integers(0, 256, 7).tolist()
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    first, second = (
        LLM(m, single_user_config(m, 12), manifest=None).generate(prompt, params)[0] for m in (loaded, plain)
    )
    assert first.outputs[0].tokens == second.outputs[0].tokens
    with pytest.raises(ValueError, match="Scaling changes the rotary angles of cached keys beyond 12"):
        LLM(loaded, EngineConfig(max_len=13), manifest=None)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["rope_parameters"] == rope
