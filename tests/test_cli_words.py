"""Words that people type: options of other tools, models without ``hf:``, help that reads well and comes quickly."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxllm import cli
from jaxllm.cli.option_synonyms import SYNONYMS
from jaxllm.cli.recipe_arguments import recipe_summary, recipes
from jaxllm.config import leaf_paths
from jaxllm.files import DataError
from recipes.quickstart import quickstart
from tests import environment
from tests.test_cli import run


def options(command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Options that a command's help lists; for a command of recipes also the run's settings."""
    monkeypatch.setenv("COLUMNS", "200")
    if command == "train":
        return {f"--{path.replace('_', '-')}" for path in leaf_paths(quickstart())} | {"--precision"}
    assert run(command, "--help") == 0
    found = set(re.findall(r"(?<![\w-])--[\w.-]+", capsys.readouterr().out))
    return found | (options("train", capsys, monkeypatch) if command in SYNONYMS[0].commands else set())


@pytest.mark.parametrize("command", sorted({command for row in SYNONYMS for command in row.commands}))
def test_synonyms_lead_to_options_that_exist_and_hide_none(command, capsys, monkeypatch):
    rows = [row for row in SYNONYMS if command in row.commands]
    words = [word for row in rows for word in row.words]
    assert len(set(words)) == len(words)
    there = options(command, capsys, monkeypatch)
    assert {row.option for row in rows} - {""} <= there
    assert not set(words) & there


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["train", "quickstart", "--lr", "1e-3"], ["--lr", "--optim.schedule.peak"]),
        (["train", "quickstart", "--learning_rate=1e-3"], ["--learning-rate", "--optim.schedule.peak"]),
        (["train", "quickstart", "--epochs", "3"], ["--epochs", "--steps"]),
        (["serve", "smollm2", "--max-model-len", "512"], ["--max-model-len", "--max-len"]),
        (["serve", "smollm2", "--tensor-parallel-size=2"], ["--tensor-parallel-size", "--mesh", "tensor=2"]),
        (["chat", "smollm2", "--max-new-tokens", "5"], ["--max-new-tokens", "--max-tokens"]),
        (["generate", "--model", "smollm2", "--prompt", "x"], ["jaxllm generate MODEL"]),
        (["generate", "Qwen/Qwen3-0.6B", "--prompt", "x"], ["hf:Qwen/Qwen3-0.6B"]),
        (["inspect", "https://huggingface.co/Qwen/Qwen3-0.6B"], ["hf:Qwen/Qwen3-0.6B"]),
        (["simulate", "Qwen/Qwen3-0.6B", "--on", "h200:8"], ["hf:Qwen/Qwen3-0.6B"]),
        (["train", "quickstart", "--data.source", "tokens.bin"], ["tokens.bin", "jaxllm data tokenize"]),
    ],
    ids=lambda value: "_".join(value[:3]) if isinstance(value, list) else "",
)
def test_words_of_other_tools_get_the_right_word_in_an_error(argv, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(*argv) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("error: ")
    assert "\n" not in said
    for word in words:
        assert word in said, said
    assert not list(tmp_path.iterdir())


def test_the_command_that_is_launched_has_its_own_words(monkeypatch):
    seen = []
    monkeypatch.setattr("jaxllm.cli.commands.launch.supervise", lambda make, *_: seen.extend(make()) or 0)
    assert run("launch", "supervise", "--", "serve", "--tp", "2") == 0
    assert seen[0].command[-2:] == ("--tp", "2")


def test_a_path_in_a_directory_that_exists_is_no_repository(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    assert run("generate", "runs/quickstrat", "--prompt", "x") == 2
    assert "hf:runs" not in capsys.readouterr().err


@pytest.mark.drawn(1)
def test_every_recipe_has_a_line_in_the_help(capsys):
    assert run("train", "--help") == 0
    said = capsys.readouterr().out
    for name, entry in recipes().items():
        line = (entry.load().__doc__ or "").splitlines()[0]
        assert recipe_summary(name) == line
        assert re.search(rf"^  {name} +{re.escape(line)}$", said, re.MULTILINE), name


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("generate", "MODEL"),
        ("train quickstart", ""),
        ("convert", "SOURCE OUT"),
        ("plan", "RECIPE"),
        ("adapters merge", "BASE ADAPTER OUT"),
    ],
)
def test_help_names_words_and_wraps_descriptions(command, usage, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    assert run(*command.split(), "--help") == 0
    said = capsys.readouterr().out
    assert re.search(rf"^usage: jaxllm {command} .*{usage}", said)
    if not command.startswith("train"):  # a setting's None is a value of its own, which may replace the recipe's
        assert "{None}" not in said
    inside = [line for line in said.splitlines() if line.startswith("│")]
    assert len({len(line) for line in inside}) <= 2
    # No description has a line that ends long before the box and goes on in the next.
    for line, after in itertools.pairwise(inside):
        first = after.strip("│ ").split(" ")[0] if re.match(r"│ {8,}\S", after) else ""
        if first and len(first) < 30 and re.match(r"│ {8,}\S", line) and not line.rstrip("│ ").endswith(")"):
            assert len(line.rstrip("│ ")) + 1 + len(first) >= len(line) - 3, (line, after)


@pytest.mark.drawn(1)
def test_help_imports_no_jax():
    """Help answers at once: the time of ``import jax`` is several times that of all the rest."""
    names = [name for name in cli.COMMANDS if name not in ("doctor",)]
    code = f"""
import sys
from jaxllm.cli import main
for name in {names}:
    try:
        main([name, "--help"])
    except SystemExit:
        pass
    assert not set(sys.modules) & {{"jax", "flax", "transformers"}}, name
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=environment.ROOT, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_data_of_less_than_a_batch_is_named_before_anything_is_compiled(tmp_path):
    from jaxllm.data import DataConfig, load_dataset
    from jaxllm.data.repeated_data import repetition_warnings
    from jaxllm.text.bpe_training import train_bpe
    from jaxllm.text.byte_tokenizer import ByteTokenizer

    (tmp_path / "ten.txt").write_text("ten tokens")
    config = DataConfig(source=str(tmp_path / "ten.txt"), tokenizer="byte", seq_len=16, batch_size=4)
    data = load_dataset(config, ByteTokenizer())
    assert "is too short to learn from" in repetition_warnings(data.train, 1)[0]
    with pytest.raises(DataError, match="the text is too short for 'bpe:2048'"):
        train_bpe(["ten tokens"], 2048, where="ten.txt")


def test_a_longer_run_is_refused_with_the_way_to_train_longer(tmp_path):
    import dataclasses

    from jaxllm.config import to_dict
    from jaxllm.train import ResumeError
    from jaxllm.train.recovery.resume import check_resumable

    config = quickstart()
    meta = {"config": to_dict(config)}
    for steps, longer in ((config.steps + 8, True), (config.steps - 8, False)):
        with pytest.raises(ResumeError, match=f"steps: {config.steps} -> {steps}") as caught:
            check_resumable(meta, dataclasses.replace(config, steps=steps), tmp_path)
        assert (f"--init-from {tmp_path} --steps N" in str(caught.value)) == longer
    check_resumable(meta, config, tmp_path)
