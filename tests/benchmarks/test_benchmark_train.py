"""Training benchmark: its models, FLOP counts and comparisons, and how many layers fit."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from types import SimpleNamespace
from typing import ClassVar

import pytest

from benchmarks import train, train_plan
from benchmarks.peers.as_run import as_run, decoder
from benchmarks.peers.interleaved import OURS, Contender, Failed, Restarted, in_turn, ratio
from benchmarks.peers.setting import Setting
from benchmarks.train_plan import SHAPES, Planned, fitted, most, planned, topology_of
from jaxllm.config import ConfigError
from jaxllm.train.model_flops import train_flops_per_token
from recipes.gpt2 import gpt2_124m
from recipes.llama3 import llama3_1b, llama3_8b
from sharding.topology import GIB

TINY = Setting(layers=2, hidden=32, mlp=64, heads=2, kv_heads=1, vocab=256, batch=2, seq_len=16)


@pytest.mark.parametrize(("shape", "recipe"), [("124m", gpt2_124m), ("1b", llama3_1b), ("8b", llama3_8b)])
def test_models_are_those_of_the_recipes(shape, recipe):
    def plain(model):
        """The configuration without fields that change no matmul: RoPE wavelengths, and what a run may choose."""
        attention = dataclasses.replace(model.pattern[0].attention, rope=None)
        block = dataclasses.replace(model.pattern[0], attention=attention)
        return dataclasses.replace(model, pattern=(block,), dtype="float32", remat="full")

    assert plain(decoder(SHAPES[shape])) == plain(recipe().model)


@pytest.mark.parametrize("shape", SHAPES)
def test_flops_are_of_the_products(shape):
    """Two counts: of the list of matmuls that both sides time, and of the formula of MFU."""
    setting = SHAPES[shape]
    listed = sum(product.flops * product.count for product in setting.products()) / setting.tokens
    assert train_flops_per_token(decoder(setting), setting.seq_len) == pytest.approx(listed, rel=1e-3)
    fewer = dataclasses.replace(setting, mlp=setting.mlp - 8)
    assert train_flops_per_token(decoder(fewer), setting.seq_len) < listed * (1 - 1e-4)


def test_utilisation_is_of_the_peak():
    """A tiny Llama by hand: weights 2 layers x (2 x 32 x 32 + 2 x 32 x 16 + 3 x 32 x 64) and the head's 32 x 256."""
    weights = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64) + 32 * 256
    attended = (16 + 1) / 2
    flops = 3 * (2 * weights + 2 * 4 * 32 * attended)
    assert train_flops_per_token(decoder(TINY), 16) == flops
    assert train.utilisation(flops, 100.0, 200 * flops) == 0.5


@pytest.mark.parametrize("limit", [1, 2, 7])
def test_the_most_layers_are_found_from_any_guess(limit):
    for most_that_fit in range(limit + 1):
        for guess in range(limit + 3):
            asked = []

            def fits(layers, asked=asked, there=most_that_fit):
                asked.append(layers)
                return layers <= there

            assert most(fits, guess, limit) == most_that_fit
            assert len(asked) == len(set(asked)) <= abs(min(max(guess, 1), limit) - most_that_fit) + 2
            assert all(1 <= layers <= limit for layers in asked)


def test_as_many_layers_as_the_compiler_lets_in_every_precision(monkeypatch):
    """Formula and compiler disagree; the compiler is right, and is asked few times."""
    compiled = []

    def compile_for(run, on):
        compiled.append((run.model.matmul_precision, run.model.layers))
        layer = 5 if run.model.matmul_precision == "plain" else 6
        return SimpleNamespace(total_bytes=(20 + layer * run.model.layers) * GIB)

    monkeypatch.setattr(train_plan, "compile_for", compile_for)
    monkeypatch.setattr(train_plan, "predict", lambda run, *_: SimpleNamespace(total=7 * run.model.layers * GIB))
    layers, asked = fitted(SHAPES["8b"], ["bf16", "fp8_current"], "h100:1x1", compiling=True)
    budget = int(84942979072 * 0.92)
    assert layers == 8 == (budget // GIB - 20) // 6
    assert asked["bf16", 8] == Planned(56 * GIB, 60 * GIB, budget, compiled=True)
    assert asked["fp8_current", 8].fits
    assert not asked["fp8_current", 9].fits
    assert len(compiled) < 8
    by_formula, _ = fitted(SHAPES["8b"], ["bf16", "fp8_current"], "h100:1x1", compiling=False)
    assert by_formula == 10


@pytest.mark.drawn(0.2)
def test_a_gpus_compiler_plans_the_step():
    """A step takes, at the least, the parameters, moments and gradients of its layers."""
    found = planned(dataclasses.replace(TINY, layers=2, hidden=256, mlp=512), "h100:1x1", True)
    assert found.compiled_bytes is not None
    weights = 2 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 512)
    assert 12 * weights < found.compiled_bytes < 40 * weights
    assert found.fits


def test_devices_by_what_jax_calls_them():
    assert topology_of("cpu", "cpu") == "cpu:1"
    assert topology_of("gpu", "NVIDIA H100 80GB HBM3") == topology_of("gpu", "NVIDIA H100 PCIe") == "h100:1x1"
    assert topology_of("tpu", "TPU v5 lite") == "v5e:1x1"
    with pytest.raises(ValueError, match="say which of them it is like"):
        topology_of("gpu", "NVIDIA T4")


class _Side:
    def __init__(self, name, seen):
        self.name, self.seen = name, seen

    def ask(self, what, **details):
        self.seen.append(self.name)
        return {"seconds": len(self.seen)}


def test_sides_take_turns_and_rounds_begin_with_another():
    seen = []
    answers = in_turn([_Side("a", seen), _Side("b", seen), _Side("c", seen)], 2, "train", steps=1)
    assert "".join(seen) == "abc" + "abc" + "cba"
    assert [answer["seconds"] for answer in answers[0]] == [4, 9]
    assert ratio([2.0, 9.0, 4.0], [1.0, 3.0, 4.0]) == (2.0, 1.0, 3.0)


def test_on_an_accelerator_a_turn_is_a_process_that_has_warmed_up():
    seen = []

    class Started:
        about: ClassVar = {"versions": {"torch": "2"}}
        name = "torch"

        @contextlib.contextmanager
        def started(self):
            seen.append("start")
            yield self
            seen.append("end")

        def ask(self, what, **details):
            seen.append(details["steps"])
            return {"seconds": len(seen)}

    side = Restarted(Started())  # pyright: ignore[reportArgumentType]
    assert side.ask("train", steps=10)["seconds"] == 3  # the second time
    assert seen == ["start", 10, 10, "end"]
    assert side.about == Started.about


def _measured(precisions):
    seconds = {"bf16": [2.0, 2.2, 1.0], "fp8_current": [1.0, 1.0, 1.0]}
    rows = [{"name": "jaxllm", "precision": p, "seconds": seconds[p], "peak_bytes": 3 * GIB} for p in precisions]
    for name, taken in (("torch", [9.0, 9.0, 9.0]), ("torch, compiled", [3.0, 4.4, 1.0])):
        rows.append({"name": name, "precision": "bf16", "seconds": taken, "peak_bytes": 4 * GIB})
    return {"about": [], "peak_flops": None, "rows": rows}


def test_ratios_are_of_the_fastest_peer_and_of_the_first_precision():
    setting = dataclasses.replace(TINY, precision="bf16")
    flops = train_flops_per_token(decoder(setting), setting.seq_len)
    result = train.completed(setting, _measured(["bf16", "fp8_current"]), peak=flops * 32)
    bf16, fp8, eager, compiled = result["rows"]
    assert (bf16["tokens_per_second"], bf16["mfu"]) == (16.0, 0.5)
    assert bf16["of_torch"] == (1.5, 1.0, 2.0)
    assert fp8["of_torch"] == (3.0, 1.0, 4.4)
    assert fp8["of_first"] == (2.0, 1.0, 2.2)
    assert "of_first" not in bf16
    assert "of_torch" not in eager | compiled
    text = train.table([{"shape": "124m", **result}])
    row = text.splitlines()[3]
    assert row == (
        "| 124m, 2 layers, 2 x 16 | jaxllm | fp8_current | 1.000 | 32 | 100.0% | 3.0 |  | **3.00** (1.00-4.40) | "
        "**2.00** (1.00-2.20) |"
    )
    assert text.splitlines()[0].endswith("| of torch | of bf16 |")


def test_all_sides_take_fewer_layers_if_one_lacks_memory(monkeypatch):
    tried = []

    def measure(sides, rounds, steps):
        layers = sides[0].setting.layers
        assert {side.setting.layers for side in sides} == {layers}
        tried.append(layers)
        if layers > 12:
            raise Failed("torch: OutOfMemoryError: CUDA out of memory. Tried to allocate")
        return _measured(["bf16"])

    monkeypatch.setattr(train, "measure", measure)
    given = {"precision": ["bf16"], "torch": ["eager", "compiled"], "torch_python": "python", "threads": 1}
    options = argparse.Namespace(**given, rounds=3, steps=1, on="h100:1x1", cache="")
    result = train.run_shape("8b", dataclasses.replace(SHAPES["8b"], device="gpu"), 17, options)
    assert tried == [17, 15, 14, 13, 12]
    assert result is not None
    assert result["setting"]["layers"] == 12
    assert [attempt["layers"] for attempt in result["tried"]] == tried[:-1]

    def broken(sides, rounds, steps):
        raise Failed("torch: ImportError: no torch")

    monkeypatch.setattr(train, "measure", broken)
    with pytest.raises(Failed, match="no torch"):
        train.run_shape("8b", SHAPES["8b"], 17, options)


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="none of these"):
        as_run(dataclasses.replace(TINY, precision="fp4"))
    with pytest.raises(ValueError, match="llama or gpt2"):
        decoder(dataclasses.replace(TINY, family="mamba"))
    with pytest.raises(SystemExit):
        train.options_of(["--on", "h100:1x1", "--precision", "fp4"])


@pytest.mark.drawn(0.3)
def test_it_runs_beside_torch(monkeypatch, tmp_path):
    gpt = dataclasses.replace(TINY, family="gpt2", kv_heads=2)
    monkeypatch.setattr(train, "SHAPES", {"124m": gpt})
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # how fast is not asked
    given = "--on cpu:1 --precision float32 --torch eager --rounds 1 --threads 1 --batch 2 --seq-len 16"
    assert train.main([*given.split(), "--out", str(tmp_path)]) == 0
    [result] = json.loads((tmp_path / "train.json").read_text())["results"]
    rows = {(row["name"], row["precision"]): row for row in result["rows"]}
    assert set(rows) == {("jaxllm", "float32"), ("torch", "float32")}
    for row in rows.values():
        assert 0 < row["mfu"] < 1
        assert 4.5 < row["loss"] < 6.5  # two steps from ln 256 = 5.5
    assert rows["jaxllm", "float32"]["of_torch"][0] > 0


@pytest.mark.drawn(0.3)
def test_a_side_that_fails_says_why():
    with (
        pytest.raises(Failed, match="jaxllm: ConfigError: precision 'fp4'"),
        Contender("jaxllm", sys.executable, OURS, dataclasses.replace(TINY, precision="fp4"), 1).started(),
    ):
        pass
