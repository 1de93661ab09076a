"""Analytic roofline: FLOPs as in training, bytes by hand, and error messages."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from jaxllm import cli
from jaxllm.plan.formulas.device_work import leaves_of
from jaxllm.plan.formulas.op_roofline import PHASES, roofline
from jaxllm.plan.formulas.serving_step import weight_bytes
from jaxllm.plan.hardware import TABLE
from jaxllm.train.model_flops import causal_mean, forward_flops_per_token, hardware_flops_per_token
from recipes.deepseek import deepseek_v3
from recipes.llama3 import llama3_8b
from recipes.mixtral import mixtral_8x22b
from recipes.quickstart import quickstart

RECIPES = {
    "quickstart": quickstart,
    "llama3_8b": llama3_8b,
    "mixtral_8x22b": mixtral_8x22b,
    "deepseek_v3": deepseek_v3,
}


def model(recipe: str, **changes):
    return dataclasses.replace(RECIPES[recipe]().model, **changes)


def costs(config, phase, batch=4, seq_len=512, devices=1, hardware="v6e"):
    return roofline(config, phase, batch=batch, seq_len=seq_len, hardware=TABLE[hardware], devices=devices)


def total(ops) -> float:
    return sum(op.flops for op in ops)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("remat", ["none", "full"])
def test_flops_of_training_are_the_trainers(recipe, remat):
    config = model(recipe, remat=remat)
    assert total(costs(config, "training")) == pytest.approx(hardware_flops_per_token(config, 512) * 4 * 512, rel=1e-9)


@pytest.mark.parametrize("recipe", RECIPES)
def test_flops_of_prefill_are_a_forward_pass_with_one_row_of_logits(recipe):
    config = model(recipe)
    whole = 4 * 512 * forward_flops_per_token(config, lambda window: causal_mean(512, window))
    unused = 2 * 4 * 511 * config.embed_dim * config.vocab_size
    assert total(costs(config, "prefill")) == pytest.approx(whole - unused, rel=1e-9)


def test_flops_of_decoding_are_a_token_that_sees_all_before_it():
    config = model("llama3_8b")
    assert total(costs(config, "decode")) == pytest.approx(4 * forward_flops_per_token(config, lambda _: 512), rel=1e-9)


def test_decoding_reads_the_weights_once_and_the_cache():
    config = model("llama3_8b")
    read = sum(op.bytes for op in costs(config, "decode", batch=1))
    weights = 2 * sum(_numbers(leaf) for leaf in leaves_of(config) if leaf.matrix and leaf.name != "embedding/table")
    cache = 2 * 32 * 512 * 2 * 8 * 128
    assert weights + cache < read < 1.002 * (weights + cache)


def _numbers(leaf) -> int:
    count = 1
    for size in leaf.shape:
        count *= size
    return count


def test_a_mixture_reads_the_experts_that_are_chosen():
    """One token reads top_k of them, thousands all; an expert's matrix is used by its share of the tokens."""
    config = model("mixtral_8x22b")
    one, many = (
        next(op for op in costs(config, "decode", batch=n) if op.name == "mlp/experts/up") for n in (1, 10_000)
    )
    matrix = 2 * config.layers * config.embed_dim * config.blocks[0].mlp.hidden
    assert one.bytes == pytest.approx(2 * matrix, rel=1e-3)
    moved = 2 * 10_000 * 2 * config.layers * (config.embed_dim + config.blocks[0].mlp.hidden)
    assert many.bytes == pytest.approx(8 * matrix + moved, rel=1e-9)
    assert many.flops == pytest.approx(10_000 * one.flops, rel=1e-9)


def test_a_window_bounds_what_is_read():
    config = model("mixtral_8x22b")
    block = config.pattern[0]
    narrow = dataclasses.replace(
        config, pattern=(dataclasses.replace(block, attention=dataclasses.replace(block.attention, window=128)),)
    )
    seen = [
        next(op for op in costs(c, "decode", seq_len=n) if op.name.startswith("attention/scores"))
        for c, n in ((narrow, 4096), (config, 128))
    ]
    assert seen[0] == seen[1]


def test_time_is_the_longer_of_the_two_and_says_which():
    for op in costs(model("llama3_8b"), "training", hardware="h100"):
        peak = TABLE["h100"]
        products, memory = op.flops / peak.flops, op.bytes / peak.bandwidth
        assert op.seconds == max(products, memory)
        assert op.bound == ("products" if op.intensity >= peak.flops / peak.bandwidth else "memory")
    halves = costs(model("llama3_8b"), "decode", devices=2)
    assert 2 * total(halves) == total(costs(model("llama3_8b"), "decode"))


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"seq_len": 0}, {"devices": 0}])
def test_what_is_not_legal_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        costs(model("quickstart"), "decode", **wrong)


def test_the_command(tmp_path, capsys):
    saved = tmp_path / "roofline.json"
    argv = ["roofline", "llama3_8b", "--on", "v5e:2x4", "--seq", "1024", "--save", str(saved), "--model.layers", "2"]
    assert cli.main(argv) == 0
    said = capsys.readouterr().out
    found = json.loads(saved.read_text())
    assert tuple(found) == PHASES
    assert all(f"llama3_8b, {phase}: " in said for phase in PHASES)
    assert "bound by" in said
    assert {op["count"] for op in found["decode"] if op["name"] == "mlp/up"} == {2}
    assert cli.main(["roofline", "llama3_8b", "--on", "v9:1x1"]) == 2
    assert "unknown topology" in capsys.readouterr().err


def test_formats_change_what_is_read_and_held():
    """int4 weights and an int8 KV cache: bytes of matrices and cache fall by their sizes, FLOPs stay."""
    config, hardware = model("llama3_8b"), TABLE["v6e"]
    fields = {"batch": 4, "seq_len": 512, "hardware": hardware}
    plain = {op.name: op for op in roofline(config, "decode", **fields)}
    packed = {op.name: op for op in roofline(config, "decode", **fields, weights="int4", kv_dtype="int8")}
    up, cache = "mlp/up", "attention/scores, values"
    assert packed[up].held / plain[up].held == weight_bytes("int4") / 2
    assert packed[up].bytes < 0.4 * plain[up].bytes
    assert packed[cache].held / plain[cache].held == (256 + 8) / 512
    assert [op.flops for op in packed.values()] == [op.flops for op in plain.values()]
    whole = 2 * sum(math.prod(leaf.shape) for leaf in leaves_of(config) if leaf.matrix)
    assert sum(op.held for name, op in plain.items() if name != cache) == whole
    with pytest.raises(ValueError, match="not of training"):
        roofline(config, "training", **fields, weights="int4")


def test_the_page_draws_the_roof(tmp_path, capsys):
    page = tmp_path / "roof.html"
    argv = ["roofline", "quickstart", "--on", "v6e:1x1", "--html", str(page)]
    assert cli.main([*argv, "--phase", "decode"]) == 0
    assert "mlp/up" in page.read_text()
    assert "<svg" in page.read_text()
    assert "GB held" in capsys.readouterr().out
    assert cli.main(argv) == 2
