"""Table of compiler options: each exists, and together they have their stated effect."""

from __future__ import annotations

import pytest

from jaxllm.parallel.compiler_flags import FLAGS, described, options
from sharding.isolate import run_isolated
from sharding.topology import GENERATIONS


def test_the_table_names_known_devices_and_no_option_twice():
    kinds = {generation.device_kind for generation in GENERATIONS.values()}
    assert {kind for flag in FLAGS for kind in flag.kinds} <= kinds
    assert len({(flag.platform, flag.name) for flag in FLAGS}) == len(FLAGS)
    for flag in FLAGS:
        assert flag.buys
        assert flag.measured
        assert flag.source


def test_options_of_a_device():
    assert options("cpu", "cpu") == {}
    assert described(options("cpu", "cpu")) == "the compiler's own"
    tpu = options("tpu", "TPU v6 lite")
    assert tpu["xla_enable_async_all_gather"] == "true"
    assert not any(name.startswith("xla_gpu") for name in tpu)
    assert options("tpu", "TPU v4") == {}
    changed = options("tpu", "TPU v6 lite", ["--xla_enable_async_all_gather=", "xla_a=3"])
    assert changed == {**{k: v for k, v in tpu.items() if k != "xla_enable_async_all_gather"}, "xla_a": "3"}
    with pytest.raises(ValueError, match="compiler_options: 'xla_a' is not NAME=VALUE"):
        options("cpu", "cpu", ["xla_a"])


@pytest.mark.drawn(0.4)
@pytest.mark.parametrize("on", ["v6e:2x4", "h100:1x8"])
def test_the_compiler_knows_every_option(on):
    platform = "tpu" if on.startswith("v") else "gpu"
    known = run_isolated("tests.parallel.flag_programs:accepted", on, timeout=600)
    assert known == [flag.name for flag in FLAGS if flag.platform == platform and flag.is_taken]


@pytest.mark.drawn(0.4)
def test_more_gathers_overlap_on_gpus():
    """On TPUs the same program takes minutes to compile; the table says what was seen."""
    counts = run_isolated("tests.parallel.flag_programs:fsdp", "h100:1x8", timeout=600)
    assert counts["with"] > counts["without"]
