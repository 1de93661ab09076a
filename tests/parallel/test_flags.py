"""Table of compiler options: each exists, and together they have their stated effect."""

from __future__ import annotations

import dataclasses

import pytest

from jaxllm.models import AttentionConfig, MoeConfig
from jaxllm.parallel import compiler_flags
from jaxllm.parallel.compiler_flags import FLAGS, Flag, described, options
from jaxllm.train.compile_step import compile_for
from recipes.mixtral import mixtral_8x22b
from sharding.isolate import run_isolated
from sharding.topology import GENERATIONS, Topology


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


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("on", ["v6e:2x4", "h100:1x8"])
def test_the_compiler_knows_every_option(on):
    there = Topology.parse(on)
    known = run_isolated("tests.parallel.flag_programs:accepted", on, timeout=600)
    assert known == [flag.name for flag in FLAGS if flag.is_taken(there.platform, there.device_kind)]


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("on", ["v5e:2x4", "v5p:2x2x1", "v6e:2x4"])
def test_gathered_weights_compile_with_the_options(on):
    found = run_isolated("tests.parallel.flag_programs:gathers", on, timeout=600)
    assert found["options"]
    assert found["all-gathers"]


@pytest.mark.drawn(0.3)
def test_a_mixture_in_micro_batches_compiles_for_a_tpu7x():
    """With the pass that the table leaves out there, its compiler fails at the sums of the experts' gradients."""
    run = mixtral_8x22b()
    (block,) = run.model.pattern
    small = dataclasses.replace(
        block, attention=AttentionConfig(heads=4, kv_heads=2, head_dim=128), mlp=MoeConfig(experts=4, hidden=256)
    )
    model = dataclasses.replace(run.model, pattern=(small,), embed_dim=256, vocab_size=1024, layers=2)
    run = dataclasses.replace(
        run,
        model=model,
        mesh="fsdp=2,expert=2,tensor=2",
        accumulate=2,
        data=dataclasses.replace(run.data, batch_size=16, seq_len=256),
        parallel=dataclasses.replace(run.parallel, sequence=True),
    )
    assert compile_for(run, "tpu7x:2x2x1").total_bytes > 0


def test_a_later_compiler_refuses_an_option_for_some_devices(monkeypatch):
    flag = Flag("xla_a", "true", "tpu", (), "", "", "", before=(0, 11), still=("TPU v5 lite",))
    monkeypatch.setattr(compiler_flags, "FLAGS", (flag,))
    taken = {}
    for version in ((0, 10, 2), (0, 12, 0)):
        monkeypatch.setattr(compiler_flags.jax, "__version_info__", version)
        taken[version[:2]] = [kind for kind in ("TPU v5 lite", "TPU v6 lite") if options("tpu", kind)]
    assert taken == {(0, 10): ["TPU v5 lite", "TPU v6 lite"], (0, 12): ["TPU v5 lite"]}
    assert not options("gpu", "TPU v5 lite")


@pytest.mark.drawn(0.3)
def test_more_gathers_overlap_on_gpus():
    """On TPUs the same program takes minutes to compile; the table says what was seen."""
    counts = run_isolated("tests.parallel.flag_programs:fsdp", "h100:1x8", timeout=600)
    assert counts["with"] > counts["without"]
