"""Mixture search: small runs are kept and repeat nothing, each method chooses, `jaxllm data mix` writes what trains."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from jaxllm import cli
from jaxllm.data import DataError, SourceConfig, load_dataset
from jaxllm.data.selection.simplex_search import spread_mixtures
from jaxllm.data.selection.sources_table import read_sources
from jaxllm.models import AttentionConfig, BlockConfig, MlpConfig
from jaxllm.plan import mixture_plan, mixture_runs
from jaxllm.plan.mixture_runs import MixtureRuns, open_task
from jaxllm.train import RunConfig
from recipes.quickstart import quickstart
from tests.test_cli import run

BLOCK = BlockConfig(AttentionConfig(heads=1, kv_heads=1, head_dim=8), MlpConfig(hidden=16))


def tiny(vocab_size: int, steps: int, *, seed: int = 0) -> RunConfig:
    """A small run of one block of width 8: a few milliseconds a step."""
    config = REAL(vocab_size, steps, seed=seed)
    model = dataclasses.replace(config.model, embed_dim=8, layers=1, pattern=(BLOCK,))
    return dataclasses.replace(config, model=model)


REAL = mixture_runs.small_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two sources and an objective like the first of them."""
    where, rng = tmp_path_factory.mktemp("mix"), np.random.default_rng(0)
    for name, letters in (("a", "abcdef  "), ("b", "uvwxyz  "), ("objective", "abcdef  ")):
        texts = ("".join(rng.choice(list(letters), 300)) for _ in range(40))
        (where / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return where


@pytest.fixture
def runs(folder, monkeypatch) -> MixtureRuns:
    """Small runs of two sources, kept between tests."""
    monkeypatch.setattr(mixture_runs, "small_run", tiny)
    sources = [SourceConfig(name, str(folder / f"{name}.jsonl")) for name in "ab"]
    objective = SourceConfig("objective", str(folder / "objective.jsonl"))
    task = open_task(sources, objective, cache_dir=str(folder / "cache"))
    return MixtureRuns(task, folder / "cache" / "mixture_runs")


def test_runs_are_kept_and_their_key_has_all_that_makes_them(runs, monkeypatch):
    tokens = runs.size(5_000)
    assert tokens == 5 * 1024
    good, bad = runs.loss([1.0, 0.0], tokens), runs.loss([0.0, 1.0], tokens)
    assert good < bad
    monkeypatch.setattr(MixtureRuns, "_train", lambda *_: pytest.fail("repeated a run"))
    again = MixtureRuns(runs.task, runs._folder)
    assert again.loss([1.0, 0.0], tokens) == good
    assert not again.finished([0.5, 0.5], tokens)
    swapped = dataclasses.replace(runs.task, sources=runs.task.sources[::-1])
    keys = {
        again.key([1.0, 0.0], tokens),
        again.key([0.0, 1.0], tokens),
        again.key([1.0, 0.0], 2 * tokens),
        MixtureRuns(runs.task, None, seed=1).key([1.0, 0.0], tokens),
        MixtureRuns(swapped, None).key([1.0, 0.0], tokens),
    }
    assert len(keys) == 5


def test_a_mixture_leaves_out_sources_without_a_share(runs):
    assert [one.name for one in runs.mixture([0.0, 1.0]).sources] == ["b"]
    assert runs.mixture([0.25, 0.75]).rows_consumed(8) == {"a": 16, "b": 48}


def test_a_loss_that_is_not_finite_is_refused_and_not_kept(runs, monkeypatch):
    monkeypatch.setattr(MixtureRuns, "_train", lambda *_: float("nan"))
    with pytest.raises(DataError, match="has the loss nan; lower its learning rate"):
        runs.loss([0.3, 0.7], 1024)
    assert not runs.finished([0.3, 0.7], 1024)


def test_the_target_has_so_many_tokens(runs):
    few = mixture_runs.first_tokens(runs.task.target, 1_000)
    assert few.total == 1_000
    assert few.content_hash != runs.task.target.content_hash
    assert mixture_runs.first_tokens(few, 5_000).total == 1_000


@pytest.mark.drawn(3)
@pytest.mark.parametrize("method", mixture_plan.METHODS)
def test_a_planted_optimum_is_found(runs, method, monkeypatch):
    """Losses are a quadratic bowl in the shares, a power law of the tokens; two thirds of the first source are best."""
    for name, small in (("WINDOW", 64), ("SOURCE_WINDOWS", 8), ("TARGET_WINDOWS", 12)):
        monkeypatch.setattr(mixture_plan, name, small)
    mixtures, sizes = spread_mixtures(2, 14), (1_000, 2_000)
    bowl = np.exp(0.3 * mixtures[:, 0]) if method == "regression" else (1 + 0.2 * (mixtures[:, 0] - 2 / 3) ** 2)
    losses = 3 * bowl[:, None] * np.array(sizes) ** -0.1
    found = mixture_plan.decide(runs.task, method, mixtures, losses, sizes, 8_000)
    best = {"projektor": 2 / 3, "regression": 0.0, "grid": 0.67}[method]
    assert found.shares[0] == pytest.approx(best, abs=0.015 if method == "projektor" else 1e-9)
    exact = 3 * 8_000**-0.1
    assert found.predict(found.shares.tolist(), 8_000) == pytest.approx(exact, rel=2e-3)
    if method != "grid":
        assert found.error < 2e-3
        assert found.ranks > 0.95
    assert found.noise_factor == pytest.approx(np.hypot(2, 3))
    page = mixture_plan.mixture_page(found)
    assert page.count("<svg") == (1 if method == "grid" else 2)
    assert "The projection to that size multiplies errors of the small runs by 3.6." in page


def test_settings_that_do_not_go_together_are_refused(runs):
    for settings, message in (
        ({"count": 3}, "3 mixtures are too few for projektor over 2 sources; give --runs 4 or more"),
        ({"sizes": (2_000, 2_000)}, r"are 2,048 and 2,048 tokens .* the second must be larger"),
        ({"sizes": (2_048, 4_096), "size": 1_000}, "size is 1,000 tokens; legal: .* 2,048, or more"),
    ):
        with pytest.raises(DataError, match=message):
            mixture_plan.choose_mixture(runs, **settings)
    with pytest.raises(DataError, match="at least two sources; there is 1"):
        open_task([SourceConfig("a")], SourceConfig("a"))


@pytest.mark.drawn(3)
def test_the_command_writes_a_table_that_train_takes(runs, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("JAXLLM_CACHE", str(folder / "cache"))
    command = ["data", "mix", "--objective", "objective.jsonl", "--sources", "a=a.jsonl", "b=b.jsonl"]
    command += ["--method", "grid", "--runs", "2", "--run-tokens", "5000", "9000", "--report", "mix.html"]
    assert run(*command) == 0
    out, err = capsys.readouterr()
    assert "small run 1 of " in err
    assert "Predicted loss at 9,216 tokens" in out
    assert "mixture.toml: for `jaxllm train RECIPE --sources mixture.toml`" in out
    assert "<svg" in Path("mix.html").read_text()
    assert run(*command) == 0
    assert "small run" not in capsys.readouterr().err

    table = read_sources(Path("mixture.toml"))
    config = cli.configure(quickstart, ["--sources", "mixture.toml", "--data.tokenizer", "byte"])
    assert config.data.mixture == table
    assert load_dataset(config.data).train.rows_consumed(1)["a"] > 0
    for words, message in (
        (["--sources", "a"], "--sources has 'a'; each source is NAME=PATH"),
        (["--sources", "a=a.jsonl", "a=b.jsonl"], "two sources named 'a'"),
        (["--sources", "a=a.jsonl", "b=none.jsonl"], "none.jsonl"),
    ):
        assert run("data", "mix", "--objective", "objective.jsonl", *words) == 2
        assert message in capsys.readouterr().err
    assert run("train", "quickstart", "--sources") == 2
    assert "--sources needs the file of a sources table" in capsys.readouterr().err
    assert run("train", "quickstart", "--sources", "none.toml") == 2
    assert "none.toml: no such file" in capsys.readouterr().err
