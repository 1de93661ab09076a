"""Tuning of kernels: what is stored is read by the kernel, and trials are of the blocks under trial."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from jaxllm.cli.main import main
from jaxllm.tune import kernel_tuning
from pallas_kernels import tuned
from pallas_kernels.flash_attention import config
from pallas_kernels.grouped_matmul import config as grouped

KIND = "TPU v9 lite"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder of tuned files, beside the operations."""
    for operation in ("flash_attention", "grouped_matmul"):
        (tmp_path / operation).mkdir()
        (tmp_path / operation / "config.py").touch()
    monkeypatch.setattr(tuned, "FOLDER", tmp_path / "tuned")
    tuned.FOLDER.mkdir()
    tuned.read.cache_clear()
    yield tuned.FOLDER
    tuned.read.cache_clear()


def rows_are_best(case, fields, backward):
    """Cost of which larger blocks have less, and of which those of 512 keys fail."""
    return None if fields["kv"] == 512 else 100 / fields["rows"] + 1 / fields["kv"]


def test_the_fastest_blocks_are_stored_by_case_and_read(folder):
    [case] = kernel_tuning.flash_cases("tpu", KIND)
    found = kernel_tuning.tune_case(case, rows_are_best, 100)
    assert found.fields == {
        "rows": 4096,
        "kv": max(one["kv"] for one in case.parts[0].problem.solutions() if one["rows"] == 4096),
    }
    assert found.before is None, "the present blocks have 512 keys"
    assert found.trials == found.candidates
    kernel_tuning.store(KIND, "jaxllm tune flash_attention", [found])
    assert dataclasses.asdict(config.tpu_blocks(KIND, 2)).items() >= found.fields.items()
    assert config.tpu_blocks(KIND, 4).rows != 4096
    [again] = kernel_tuning.flash_cases("tpu", KIND)
    second = kernel_tuning.tune_case(again, rows_are_best, 100)
    assert second.fields == {}, "none is faster than those that were stored"
    kernel_tuning.store(KIND, "jaxllm tune flash_attention", [second])
    assert config.tpu_blocks(KIND, 2).rows == 4096, "and they stay"
    assert (
        "jaxllm tune flash_attention"
        in json.loads(tuned.path(KIND).read_text())["operations"]["flash_attention"]["command"]
    )


def test_tiles_of_a_grouped_matmul_are_stored_by_shape(folder):
    case = next(kernel_tuning.grouped_cases("tpu", KIND))
    found = kernel_tuning.tune_case(case, lambda case, fields, backward: 1 / fields["rows"], 1000)
    assert found.fields["rows"] == 1024
    kernel_tuning.store(KIND, "jaxllm tune grouped_matmul", [found])
    assert grouped.matmul_tiles(KIND, 16384, 8, 4096, 14336, 2).rows == 1024
    assert grouped.matmul_tiles(KIND, 16384, 8, 4096, 14080, 2).rows != 1024, "another shape has its own"


def test_trials_take_their_fields_and_only_inside():
    before = config.tpu_blocks(KIND, 2)
    with tuned.trial_fields("flash_attention", {"rows": 256}):
        assert config.tpu_blocks(KIND, 2) == dataclasses.replace(before, rows=256)
        assert grouped.matmul_tiles(KIND, 512, 4, 256, 256, 2) == grouped.matmul_tiles("other", 512, 4, 256, 256, 2)
    assert config.tpu_blocks(KIND, 2) == before


def test_a_trial_with_wrong_values_or_that_fails_is_out():
    scale, shape = 1.0, (8, 8)

    def run(implementation, x):
        return x if implementation == "xla" else jnp.reshape(x * scale, shape)

    case = kernel_tuning.TuningCase(
        "flash_attention", "all", config.FlashTpuBlocks(), (), run, lambda key: (jax.random.normal(key, (8, 8)),), 1
    )
    cost = kernel_tuning.device_cost()
    took = cost(case, {"rows": 256}, True)
    assert took is not None
    assert took > 0
    scale = 1.1
    assert cost(case, {"rows": 256}, True) is None
    scale, shape = 1.0, (3, 5)
    assert cost(case, {"rows": 256}, True) is None


def test_the_command_says_what_it_cannot_tune(capsys):
    assert main(["tune", "flash_attention"]) != 0
    assert "nothing to tune" in capsys.readouterr().err
    assert main(["tune", "flash_attention", "--on", "h100:1x8"]) != 0
    assert "only the TPU compiler estimates cycles" in capsys.readouterr().err
