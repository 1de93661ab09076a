"""Compiled deployments: planned bytes, what is refused, and the command beside a compiler."""

from __future__ import annotations

import dataclasses

import pytest

from jaxllm import cli
from jaxllm.plan.hardware import TABLE, Cluster
from jaxllm.simulate import DeploymentError
from jaxllm.simulate.search.compiled_deployment import (
    PlannedBytes,
    compile_deployment,
    engine_sizes,
    why_not_compiled,
)
from tests.simulate.served import deployment


def test_sizes_are_those_of_the_plan():
    one = deployment("v6e:1x1", kv_dtype="int8", pages=None, max_batched_tokens=256)
    sizes = engine_sizes(one)
    assert (sizes.pages, sizes.page_size, sizes.max_len) == (one.spec.pages[0], 128, one.spec.max_len)
    planned = PlannedBytes.of(one)
    assert planned.cache == pytest.approx(one.spec.pages[0] * 128 * one.step_model.token_bytes)
    assert planned.total <= 0.9 * one.cluster.hardware.hbm_bytes


def test_what_cannot_be_compiled_says_why():
    foreign = dataclasses.replace(TABLE["h100"], name="other", like="h100")
    elsewhere = dataclasses.replace(deployment(), cluster=Cluster.parse("other:1x1", {**TABLE, "other": foreign}))
    assert "no compiler for other" in why_not_compiled(elsewhere)
    assert "does not pack weights as fp8" in why_not_compiled(deployment(weights="fp8"))
    assert why_not_compiled(deployment()) == ""
    assert "pipeline stages" in why_not_compiled(deployment("h100:1x2", "stage=2"))
    spread = deployment("h100:1x2", "context=2", kv_span=True)
    assert "kv_span" in why_not_compiled(spread)
    with pytest.raises(DeploymentError, match="not compiled: programs with kv_span"):
        compile_deployment(spread)


@pytest.mark.drawn(0.2)
def test_programs_are_compiled_with_the_planned_bytes():
    one = deployment("h100:1x2", "tensor=2", max_batched_tokens=64, decode_steps=2)
    found = compile_deployment(one)
    assert sorted(name.split("-")[0] for name in found.programs) == ["decode", "prompt"]
    for report in found.programs.values():
        assert report.num_devices == 2
        assert report.argument_bytes == pytest.approx(found.planned.weights + found.planned.cache, rel=0.02)
    assert found.to_json()["planned"]["weights"] == found.planned.weights


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_prompts_over_context_write_their_pages_in_place(kv_dtype: str):
    """A TPU's scatter of windows in dimensions that are apart would copy the whole pool into another layout."""
    sizes = {"page_size": 128, "pages": 1024, "max_batched_tokens": 64, "kv_dtype": kv_dtype}
    one = deployment("v6e:2x2", "context=2,tensor=2", **sizes)
    found = compile_deployment(one)
    (prompt,) = (report for name, report in found.programs.items() if name.startswith("prompt"))
    assert prompt.temp_bytes < 0.1 * found.planned.cache


def test_the_command_refuses_a_compilation_of_mixes(capsys):
    assert cli.main(["plan", "llama3_8b", "--serve", "--on", "h100:1", "--compile", "--mix"]) != 0
    assert "--compile" in capsys.readouterr().err


@pytest.mark.drawn(0.1)
def test_the_command_compiles_its_first_choice(capsys):
    words = ["plan", "quickstart", "--serve", "--on", "h100:1", "--trace", "poisson:1", "--lengths", "32/4"]
    words += ["--requests", "4", "--budgets", "64", "--max-sequences", "4", "--top", "1", "--compile"]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert "GiB of a device" in said
    assert "compiled: prompt-64" in said
    assert "compiled: decode-4" in said
