"""The ``jaxllm`` command: its output, its refusals, its commands."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import jaxllm
from jaxllm import cli
from jaxllm.infer import EngineConfig
from jaxllm.train import RunConfig, TrainResult
from recipes.quickstart import quickstart
from tests import environment
from tests.train.runs import stopped_at


def run(*argv: str) -> int:
    """Exit status, whether returned or raised by the argument parser."""
    try:
        return cli.main([str(word) for word in argv])
    except SystemExit as ended:
        return int(ended.code or 0)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """Configurations that would have been trained."""
    seen: list[RunConfig] = []

    def train(config: RunConfig) -> TrainResult:
        seen.append(config)
        return TrainResult(Path(config.out) / config.name, config.steps, True, None, None)

    monkeypatch.setattr("jaxllm.train.train", train)
    return seen


# Help


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_the_overview_lists_every_command_once(argv, capsys):
    assert run(*argv) == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: jaxllm COMMAND")
    for name in cli.COMMANDS:
        assert len(re.findall(rf"^  {name} ", said, re.MULTILINE)) == 1
    assert said.count("commands:") == 1
    assert max(map(len, said.splitlines())) <= 100


def test_every_command_explains_itself(capsys):
    for name, words in {
        "train": ["RECIPE", "quickstart", "llama3_8b", "FILE.py:FUNCTION"],
        "generate": ["--prompt", "--max-tokens", "--temperature", "--seed"],
        "eval": ["--step", "bits per byte"],
        "reproduce": ["--out", "receipt.json"],
    }.items():
        assert run(name, "--help") == 0
        said = capsys.readouterr().out
        for word in words:
            assert word.lower() in said.lower(), (name, word)


def test_the_summary_of_a_command_is_the_first_line_of_its_docstring():
    for name, command in cli.COMMANDS.items():
        function = getattr(importlib.import_module(command.module), command.function)
        assert (function.__doc__ or "").splitlines()[0] == command.summary, name


def test_serve_accepts_deprecated_options(monkeypatch, capsys):
    seen = []

    def make(**fields):
        seen.append(fields)
        return EngineConfig(**fields)

    monkeypatch.setattr("jaxllm.serve.multihost_server.serve", lambda config, factory, **fields: None)
    monkeypatch.setattr("jaxllm.infer.engine_config.EngineConfig", make)
    assert run("serve", "x", "--port", "0", "--max-sequences", "4", "--max-batched-tokens", "64") == 0
    assert capsys.readouterr().err == ""
    assert run("serve", "x", "--port", "0", "--sequences", "4", "--budget=64") == 0
    assert capsys.readouterr().err == (
        "--sequences is now --max-sequences; the old name goes away in the next release.\n"
        "--budget is now --max-batched-tokens; the old name goes away in the next release.\n"
    )
    assert seen[0] == seen[1]
    assert {4, 64} <= set(seen[0].values())


def test_a_recipes_help_lists_every_setting_with_its_value(capsys):
    assert run("train", "quickstart", "--help") == 0
    said = re.sub(r"\s+", " ", capsys.readouterr().out)
    for setting in ("--steps", "--data.seq-len", "--optim.schedule.peak", "--model.layers", "--checkpoint.every"):
        assert setting in said
    assert f"default: {quickstart().steps}" in said
    assert "default: 2048" in said


def test_the_version(capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out.strip() == jaxllm.__version__


# What is not there


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["trian", "quickstart"], ["no command 'trian'. Did you mean 'train'?", "usage:"]),
        (
            ["train", "quikstart"],
            ["no recipe 'quikstart'. Did you mean 'quickstart'?", "llama3_8b", "FILE.py:FUNCTION"],
        ),
        (["train", "quickstart", "--stepz", "3"], ["no setting --stepz. Did you mean", "--steps"]),
        (["train", "quickstart", "--data.seqlen=3"], ["no setting --data.seqlen. Did you mean", "--data.seq-len"]),
        (["train", "quickstart", "--seq_len", "3"], ["no setting --seq-len. Did you mean", "--data.seq-len"]),
        (["train", "quickstart", "--heads", "3"], ["Did you mean --model.pattern.0.attention.heads"]),
        (["train", "quickstart", "--model.no-tide"], ["no setting --model.no-tide"]),
        (["train", "quickstart", "--steps", "many"], ["steps", "many"]),
        (["train", "quickstart", "--optim.schedule.kind", "linear"], ["linear", "cosine", "wsd", "constant"]),
        (["train", "quickstart", "--accumulate", "3"], ["accumulate = 3 does not divide", "[1, 2, 4, 8, 16]"]),
        (["train", "quickstart", "--mesh", "fdsp=8"], ["unknown mesh axis 'fdsp'", "fsdp"]),
        (["train", "quickstart", "--model.vocab-size", "100"], ["2048", "100"]),
        (["train", "no/such.py:f"], ["there is no file no/such.py"]),
        (["generate", "no/such/run", "--prompt", "x"], ["no/such/run is not a run's directory", "no such directory"]),
        (
            ["generate", "x", "--prompt", "x", "--mesh", "stage=4,data=2"],
            ["stage=4 does not go with data=2", "Give stage and tensor alone"],
        ),
        (["generate", "x"], ["--prompt"]),
        (["generate"], ["required"]),
        (["eval", "no/such/run"], ["no/such/run is not a run's directory"]),
        (["reproduce", "no/such.json"], ["there is no no/such.json"]),
    ],
    ids=lambda value: "_".join(value[:4]) if isinstance(value, list) else "",
)
def test_what_is_not_there_is_named_with_what_is(argv, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(*argv) == 2
    said = capsys.readouterr().err
    flat = re.sub(r"[\s│]+", " ", said)
    for word in words:
        assert word in flat, flat
    assert "Traceback" not in said
    assert not list(tmp_path.iterdir()), "nothing was written"


def test_mistakes_of_ours_keep_their_traceback(monkeypatch):
    def broken() -> int:
        raise KeyError("ours")

    with pytest.raises(KeyError):
        cli.guarded(broken)

    def theirs() -> int:
        raise cli.UsageError("a message")

    assert cli.guarded(theirs) == 2
    monkeypatch.setenv("JAXLLM_TRACEBACK", "1")
    with pytest.raises(cli.UsageError):
        cli.guarded(theirs)


def test_a_value_error_of_another_library_is_not_taken_for_the_users(capsys):
    with pytest.raises(ValueError, match="invalid literal"):
        cli.guarded(lambda: int("x"))  # raised here, in tests
    assert cli.guarded(lambda: RunConfig(steps=0).steps) == 2
    assert capsys.readouterr().err == "error: steps = 0; give 1 or more.\n"


# Recipes


def test_settings_override_the_recipe(trained):
    assert run(
        "train", "quickstart", "--steps", "7", "--data.seq_len=64", "--optim.schedule.kind", "cosine",
        "--model.no-tied", "--model.pattern.0.mlp.hidden", "96", "--name", "mine",
    ) == 0  # fmt: skip
    (config,) = trained
    default = quickstart()
    assert (config.steps, config.data.seq_len, config.name) == (7, 64, "mine")
    assert config.optim.schedule.kind == "cosine"
    assert not config.model.tied
    assert config.model.pattern[0].mlp.hidden == 96
    # All else is the recipe's.
    assert config.model.pattern[0].attention == default.model.pattern[0].attention
    assert config.optim.schedule.peak == default.optim.schedule.peak
    assert config.checkpoint == default.checkpoint


def test_a_stopped_run_ends_as_its_signal_asks(monkeypatch):
    stopped = TrainResult(Path("runs/x"), 3, False, 15, None)
    monkeypatch.setattr("jaxllm.train.train", lambda config: stopped)
    assert run("train", "quickstart") == 128 + 15


RECIPE = """
from __future__ import annotations
import dataclasses
from jaxllm.train import RunConfig
from recipes.quickstart import quickstart

@dataclasses.dataclass
class Mine:  # with annotations as strings, dataclasses look their module up
    steps: int = 11

def mine() -> RunConfig:
    return dataclasses.replace(quickstart(), name="mine", steps=Mine().steps)

def nothing():
    return {"steps": 3}
"""


def test_a_precision_sets_its_fields_and_settings_go_on_top(trained, capsys):
    argv = ("train", "quickstart", "--steps", "3", "--precision", "bf16_collage", "--model.dtype", "float32")
    assert run(*argv) == 0
    model, optim = trained[0].model, trained[0].optim
    assert (model.param_dtype, model.dtype, optim.rounding, trained[0].steps) == ("bfloat16", "float32", "collage", 3)
    assert run("train", "quickstart", "--precision=fp8") == 2
    assert "none of these: float32, bf16" in capsys.readouterr().err
    assert run("train", "quickstart", "--precision") == 2
    assert "needs a name" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["recipe.py", "sharding.py", "recipes.py", "jax.py", "two words.py"])
def test_a_recipe_of_ones_own_whatever_the_file_is_called(name, trained, tmp_path, monkeypatch):
    """Its module gets a name of its own: a file called sharding.py does not replace the package."""
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(RECIPE)
    before = {module: sys.modules.get(module) for module in ("sharding", "recipes", "jax")}
    for module, ours in before.items():
        monkeypatch.setitem(sys.modules, module, ours)  # for the other tests, should it be replaced here
    assert run("train", f"./{name}:mine", "--data.batch-size", "4") == 0
    assert (trained[0].name, trained[0].steps, trained[0].data.batch_size) == ("mine", 11, 4)
    assert {module: sys.modules.get(module) for module in before} == before


def test_a_recipe_file_without_the_function_names_the_closest(tmp_path, capsys):
    (tmp_path / "recipe.py").write_text(RECIPE)
    assert run("train", f"{tmp_path / 'recipe.py'}:mien") == 2
    assert "has no function 'mien'. Did you mean 'mine'?" in capsys.readouterr().err


def test_a_recipe_that_returns_something_else_is_refused(tmp_path, capsys, trained):
    (tmp_path / "recipe.py").write_text(RECIPE)
    assert run("train", f"{tmp_path / 'recipe.py'}:nothing") == 2
    assert "nothing returned a dict, not a RunConfig" in capsys.readouterr().err
    assert not trained


def test_every_installed_recipe_is_a_configuration(trained):
    for name in cli.recipes():
        config = cli.find_recipe(name)()
        assert isinstance(config, RunConfig)
        assert config.name == name


# With a model


@pytest.mark.drawn(3)
def test_generate_writes_the_prompt_and_goes_on(finished, capsys):
    model = finished / "runs" / "tiny"
    texts = []
    for seed in (1, 1, 2):
        assert run("generate", model, "--prompt", "the cat", "--max-tokens", "24", "--seed", seed) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0].startswith("the cat")
    assert len(texts[0]) > len("the cat\n")
    assert texts[0] == texts[1] != texts[2]
    assert run("generate", model, "--prompt", "the cat", "--max-tokens", "24", "--temperature", "0") == 0
    assert capsys.readouterr().out.startswith("the cat")


@pytest.mark.drawn(3)
def test_generate_answers_a_batch(finished, tmp_path, capsys):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [
        {
            "custom_id": name,
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "tiny", "prompt": "the", "ignore_eos": True, **more},  # drawn without a seed
        }
        for name, more in (("a", {"max_tokens": 3}), ("b", {"max_tokens": 5}), ("c", {"colour": "red"}))
    ]
    source.write_text("\n".join(map(json.dumps, rows)))
    command = ("generate", finished / "runs" / "tiny", "--batch", source, "--out", out, "--max-sequences", "2")
    assert run(*command) == 1
    said = capsys.readouterr().err
    assert "2 of 3 requests answered" in said
    assert "1 requests failed" in said
    found = [json.loads(row) for row in out.read_text().splitlines()]
    assert [(row["custom_id"], row["response"]["body"]["usage"]["completion_tokens"]) for row in found] == [
        ("a", 3), ("b", 5),
    ]  # fmt: skip
    assert json.loads((tmp_path / "out.errors.jsonl").read_text())["response"]["status_code"] == 400
    for options, words in (
        ((), "exists"),
        (("--temperature", "0"), "--temperature is for --prompt"),
        (("--prompt", "x"), "give --prompt TEXT, or --batch FILE"),
    ):
        assert run(*command, *options) == 2
        assert words in capsys.readouterr().err
    assert run("generate", finished / "runs" / "tiny", "--prompt", "x", "--max-len", "9") == 2
    assert "--max-len is for --batch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--temperature", "-1"], "temperature = -1.0"),
        (["--max-tokens", "0"], "max_tokens = 0"),
    ],
)
def test_generate_refuses_what_it_cannot_do(options, words, finished, capsys):
    assert run("generate", finished / "runs" / "tiny", "--prompt", "a", *options) == 2
    out, err = capsys.readouterr()
    assert words in err
    assert out == "", "the prompt is not written before it is known that it can be continued"


def test_a_run_has_its_own_dtype(finished, capsys):
    model, settings = str(finished / "runs" / "tiny"), ["--prompt", "a", "--max-tokens", "2"]
    assert run("generate", model, *settings, "--dtype", "float32") == 0
    assert run("generate", model, *settings, "--dtype", "bfloat16") == 2
    assert "bfloat16" in capsys.readouterr().err


def test_eval_measures_bits_per_byte_beside_a_bigram(finished, capsys):
    # Twelve steps do not beat the bigram: the exit status says so.
    assert run("eval", finished / "runs" / "tiny") == 1
    said = capsys.readouterr().out
    model, bigram = (float(found) for found in re.findall(r"([\d.]+) bits per byte", said))
    assert model > bigram
    assert "step 12" in said
    assert "does not beat" in said
    rows = (finished / "runs" / "tiny" / "metrics.jsonl").read_text()
    logged = float(re.findall(r'"heldout_bits_per_byte": ([\d.]+)', rows)[-1])
    assert model == pytest.approx(logged, abs=2e-4), "one device here, eight there"
    assert run("eval", finished / "runs" / "tiny", "--step", "4") == 1
    assert "step 4" in capsys.readouterr().out
    assert run("eval", finished / "runs" / "tiny", "--step", "5") == 2
    assert "5" in capsys.readouterr().err


@pytest.mark.drawn(1)
def test_eval_without_anything_held_out_says_so(finished, tmp_path, capsys):
    directory = stopped_at(finished, 2, heldout_fraction=0.0, out=tmp_path)
    assert run("eval", directory) == 2
    assert "without held-out text" in capsys.readouterr().err


# In a process of its own


def script() -> str:
    """The installed command."""
    path = Path(sys.executable).parent / "jaxllm"
    if not path.exists():
        pytest.skip("the package is not installed beside this python")
    return str(path)


@pytest.mark.drawn(0.3)
def test_a_directory_of_the_same_name_does_not_shadow_ours(tmp_path):
    """People run jaxllm where their own recipes/ and sharding.py lie."""
    (tmp_path / "recipes").mkdir()
    for name in ("recipes/__init__.py", "recipes/quickstart.py", "sharding.py", "pallas_kernels.py", "jaxllm.py"):
        (tmp_path / name).write_text("raise SystemExit('theirs')\n")
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [script(), "train", "quickstart", "--mesh", "fdsp=2"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert "theirs" not in done.stdout + done.stderr
    assert "unknown mesh axis 'fdsp'" in done.stderr
    assert done.returncode == 2


def test_a_reader_that_has_gone_is_no_error():
    """`jaxllm generate ... | head` ends quietly."""
    code = (
        "import sys, time\n"
        "from jaxllm.cli import guarded\n"
        "def talk():\n"
        "    while True: print('x' * 1000, flush=True)\n"
        "sys.exit(guarded(talk))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=environment.ROOT
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr:
        assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 141


def test_python_dash_m_runs_a_recipe(monkeypatch, trained):
    """`python -m recipes.quickstart --steps 3` is `jaxllm train quickstart --steps 3`."""
    monkeypatch.setattr(sys, "argv", ["recipes/quickstart.py", "--steps", "3"])
    assert cli.run_recipe(quickstart) == 0
    assert trained[0].steps == 3
    main: Any = (environment.ROOT / "recipes" / "quickstart.py").read_text()
    assert "raise SystemExit(run_recipe(quickstart))" in main


def test_ctrl_c_is_one_line(capsys):
    def interrupted() -> int:
        raise KeyboardInterrupt

    assert cli.guarded(interrupted) == 130
    assert capsys.readouterr().err == "interrupted\n"


# A process started in the background of a script ignores SIGINT until told otherwise.
CONVERT = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from jaxllm import cli
from jaxllm.cli.commands import convert
def slow_bar(*words):  # waits at the first tensor
    def at(*where):
        print("now", flush=True)
        time.sleep(60)
    return convert.contextlib.nullcontext(at)
convert.progress_bar = slow_bar
sys.exit(cli.main(["convert", sys.argv[1], sys.argv[2], "--to", "hf"]))
"""


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_conversion_that_is_stopped_leaves_nothing(number, status, finished, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", CONVERT, finished / "runs" / "tiny", tmp_path / "out"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=environment.ROOT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "now\n"
    assert len(list(tmp_path.iterdir())) == 1, "the temporary directory"
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == status
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


# Other forms of a model


@pytest.mark.drawn(1)
def test_convert_says_what_it_wrote(finished, tmp_path, capsys):
    assert run("convert", finished / "runs" / "tiny", tmp_path / "hf", "--to", "hf") == 0
    said = capsys.readouterr().out
    assert re.search(r"hf: 11 tensors, [\d.]+ MiB, float32\n$", said)
    assert run("convert", tmp_path / "hf", tmp_path / "ours", "--to", "jaxllm", "--dtype", "bfloat16") == 0
    assert capsys.readouterr().out.endswith("MiB, bfloat16\n")
    assert run("generate", tmp_path / "ours", "--prompt", "the cat", "--max-tokens", "4") == 0
    assert capsys.readouterr().out.startswith("the cat")
    assert run("eval", tmp_path / "ours") == 2
    assert "was not trained with jaxllm" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["no/such", "out", "--to", "hf"], "there is no no/such on this machine"),
        (["no/such", ".", "--to", "hf"], ". exists; choose another name"),
        (["no/such", "out", "--to", "onnx"], "invalid choice 'onnx'"),
        (["nowhere", "out"], "--to"),
        (["hf:", "out", "--to", "hf"], "hf:"),
    ],
)
def test_convert_refuses_what_it_cannot_do(argv, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("convert", *argv) == 2
    assert words in re.sub(r"[\s│]+", " ", capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


def test_inspect_shows_and_fails_where_something_is_wrong(finished, tmp_path, capsys):
    model = finished / "runs" / "tiny"
    assert run("inspect", model) == 0
    said = capsys.readouterr().out
    assert "2 heads, 1 of keys and values, of 8" in said
    assert "findings" not in said
    assert run("inspect", model, "--all") == 0
    assert len(capsys.readouterr().out.splitlines()) >= len(said.splitlines())
    assert run("inspect", model, "--json") == 0
    assert json.loads(capsys.readouterr().out)["format"] == "jaxllm run"
    (tmp_path / "config.json").write_text('{"model_type": "lama"}')
    assert run("inspect", tmp_path) == 1
    assert "Did you mean 'llama'" in capsys.readouterr().out
    assert run("inspect", tmp_path / "nothing") == 2
    assert "there is no" in capsys.readouterr().err
