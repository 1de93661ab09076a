"""Self-check of kernels: a kernel that is wrong on a device is never chosen there, and no device checks twice."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import pytest

from jaxllm import cli
from pallas_kernels import _self_check, explain
from pallas_kernels._compat import TargetDevice, interpreting
from pallas_kernels._dispatch import dispatch
from pallas_kernels._self_check import Sample, Verdict
from pallas_kernels.flash_attention import check_samples
from tests import environment
from tests.proofs.kernels.mutants import bodies, mutated
from tests.proofs.kernels.self_check import KERNELS, MUTANTS, UNSEEN, self_check_sees_mutants

GPU = TargetDevice("gpu", "NVIDIA Test")
TPU = TargetDevice("tpu", "TPU Test")
REFUSED = "pallas_gpu is not chosen on NVIDIA Test"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Empty cache, of verdicts in memory too, where the CPU stands for an attached GPU."""
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path))
    monkeypatch.setattr(_self_check, "_verdicts", {})
    monkeypatch.setattr(_self_check, "_attached", lambda device: jax.devices()[0] if device == GPU else None)
    monkeypatch.setattr("pallas_kernels._dispatch.target_device", lambda: GPU)
    return tmp_path / "kernels"


@pytest.fixture
def checks(monkeypatch):
    """Calls of the check, which passes or not as the test says."""
    calls: list[tuple[str, str]] = []
    passes = {"value": True}

    def check(operation, implementation, device):
        calls.append((operation, implementation))
        why = "" if passes["value"] else "float32, causal: differs"
        return Verdict(operation, implementation, GPU.kind, passes["value"], {"float32": 0.5}, why, 0.1)

    monkeypatch.setattr(_self_check, "check", check)
    return calls, passes


IMPLEMENTATIONS = {"pallas_gpu": lambda x: "kernel", "pallas_tpu": lambda x: "other", "xla": lambda x: "plain"}


def choose(operation="flash_attention", choice=None):
    return dispatch(operation, IMPLEMENTATIONS, choice, 1)


def forget():
    """What a new process knows."""
    _self_check._verdicts.clear()


def test_a_kernel_is_checked_once_and_chosen(cache, checks, capsys):
    calls, _ = checks
    assert [choose(), choose()] == ["kernel", "kernel"]
    forget()
    assert choose() == "kernel"
    assert calls == [("flash_attention", "pallas_gpu")]
    assert capsys.readouterr().err.count("compared with the reference on NVIDIA Test (float32 5.0e-01)") == 1
    assert len(list(cache.iterdir())) == len(_self_check.stored_verdicts()) == 1


def test_a_wrong_one_is_not_and_says_so_in_every_process(cache, checks):
    calls, passes = checks
    passes["value"] = False
    for _ in range(2):
        with pytest.warns(
            UserWarning, match="pallas_gpu is not chosen on NVIDIA Test: float32, causal: differs; a slow"
        ):
            assert choose() == "plain"
        forget()
    assert len(calls) == 1
    assert choose(choice="pallas_gpu") == "kernel"  # by name it is what was asked for
    with pytest.warns(UserWarning, match=REFUSED):
        assert "pallas_gpu: not chosen on NVIDIA Test" in explain("flash_attention")


def test_the_doctor_shows_verdicts(cache, checks, capsys):
    choose()
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert f"jax {jax.__version__}" in out
    assert "flash_attention on gpu: pallas_gpu, or the next that supports the arguments" in out
    assert "flash_attention, pallas_gpu: compared with the reference on NVIDIA Test (float32 5.0e-01)" in out


def test_a_warning_comes_once_a_process(cache, checks):
    _, passes = checks
    passes["value"] = False
    with pytest.warns(UserWarning, match=REFUSED):
        choose()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose() == "plain"


def test_what_is_not_attached_goes_by_stored_verdicts(cache, checks, monkeypatch):
    calls, passes = checks
    passes["value"] = False
    monkeypatch.setattr(_self_check, "_attached", lambda device: None)
    assert choose() == "kernel"
    monkeypatch.setattr("pallas_kernels._dispatch.target_device", lambda: TPU)
    assert choose() == "other"
    monkeypatch.setattr("pallas_kernels._dispatch.target_device", lambda: GPU)
    assert calls == []
    forget()
    monkeypatch.setattr(_self_check, "_attached", lambda device: jax.devices()[0])
    with pytest.warns(UserWarning, match=REFUSED):
        choose()
    forget()
    monkeypatch.setattr(_self_check, "_attached", lambda device: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose() == "plain"
    assert len(calls) == 1


def test_a_changed_source_is_checked_anew(cache, checks, monkeypatch):
    calls, _ = checks
    choose()
    forget()
    monkeypatch.setattr(_self_check, "_digest", lambda *_: "another")
    choose()
    assert len(calls) == 2


def test_the_digest_is_of_source_device_and_operation(monkeypatch):
    digest = _self_check._digest.__wrapped__
    found = digest("flash_attention", "pallas_gpu", "NVIDIA H100")
    assert found == digest("flash_attention", "pallas_gpu", "NVIDIA H100")
    others = {
        digest("flash_attention", "pallas_gpu", "NVIDIA H200"),
        digest("grouped_matmul", "pallas_gpu", "NVIDIA H100"),
    }
    monkeypatch.setattr(jax, "__version__", "0.0")
    others.add(digest("flash_attention", "pallas_gpu", "NVIDIA H100"))
    assert len(others | {found}) == 4


def test_a_check_that_could_not_run_is_repeated(cache, monkeypatch):
    """Where memory is short, say: not chosen now, and tried again by the next process."""
    calls = []

    def samples(dtype):
        calls.append(dtype)
        return [Sample("x", fails, (jnp.ones(3, dtype),))]

    def fails(name, x):
        raise RuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(check_samples, "samples", samples)
    for _ in range(2):
        with pytest.warns(UserWarning, match="RuntimeError: RESOURCE_EXHAUSTED"):
            assert choose() == "plain"
        forget()
    assert calls == [*_self_check.DTYPES] * 2
    assert not cache.exists()


def test_a_damaged_verdict_is_made_again(cache, checks):
    calls, _ = checks
    choose()
    (file,) = cache.iterdir()
    file.write_text(file.read_text()[:20])
    forget()
    assert choose() == "kernel"
    assert len(calls) == 2
    assert json.loads(file.read_text())["passed"]


def test_several_processes_do_not_fall_back_alone(cache, checks, monkeypatch):
    _, passes = checks
    passes["value"] = False
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(RuntimeError, match="With several processes all must use the same one"):
        choose()


def test_it_runs_while_a_program_is_traced(cache, monkeypatch):
    """The values of the samples are those of a device, not of the trace that asks."""
    seen = []

    def run(name, x):
        return x * (2 if name == "reference" else 2.5)

    def samples(dtype):
        return [Sample("x", run, (jnp.ones(3, dtype),), 1)]

    monkeypatch.setattr(check_samples, "samples", samples)

    @jax.jit
    def program(x):
        seen.append(choose())
        return x

    with pytest.warns(UserWarning, match=r"differs from the reference by 2\.5e-01"):
        program(jnp.ones(2))
    assert seen == ["plain"]


TWO = """
import sys, time, jax
from pallas_kernels import _self_check
from pallas_kernels._compat import TargetDevice
from pallas_kernels._self_check import Verdict
def check(operation, implementation, device):
    time.sleep(0.5)
    return Verdict(operation, implementation, "NVIDIA Test", True, {"float32": 0.0}, "", 0.5)
_self_check.check, _self_check._attached = check, lambda device: jax.devices()[0]
print(_self_check.may_choose("flash_attention", "pallas_gpu", TargetDevice("gpu", "NVIDIA Test")).passed)
"""


@pytest.mark.drawn(0.3)
def test_two_processes_at_once(cache):
    running = [
        subprocess.Popen([sys.executable, "-c", TWO], cwd=environment.ROOT, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [one.communicate(timeout=120)[0].strip() for one in running] == ["True", "True"]
    (verdict,) = _self_check.stored_verdicts()
    assert verdict.passed


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("operation", ["flash_attention", "grouped_matmul", "paged_attention"])
def test_kernels_pass_their_own_samples(operation):
    """That of the cross-entropy has a thousand programs: it runs with its mutants."""
    with interpreting():
        verdict = _self_check.check(operation, "pallas_gpu", jax.devices()[0])
    assert verdict.passed, verdict
    assert 0 < verdict.errors["float32"] < verdict.errors["bfloat16"] < _self_check.BOUNDS["bfloat16"]


def test_a_mutant_does_not():
    """All mutants: ``make proof kernels ONLY=self_check_sees_mutants``."""
    with mutated("pallas_kernels.grouped_matmul", "steps", "(stop - 1) // rows", "(stop - 2) // rows"), interpreting():
        verdict = _self_check.check("grouped_matmul", "pallas_gpu", jax.devices()[0])
    assert not verdict.passed
    assert "uneven groups: differs from the reference by" in verdict.why


@pytest.mark.drawn(0.3)
def test_nor_does_one_of_a_tpu_kernel():
    """A width in several parts takes experts of millions of weights: smaller ones pass whole."""
    mutant = "fused_moe", "another part of the width"
    assert mutant in MUTANTS
    self_check_sees_mutants(mutant)


def test_mistakes_of_every_kernel_are_shown_to_its_samples():
    """A kernel for TPUs alone too; a mistake that is said to be unseen is one that there is."""
    shown = {KERNELS[name] for name, _ in MUTANTS}
    of = {operation: {kernel for one, kernel in shown if one == operation} for operation in _self_check.SAMPLES}
    assert of["fused_moe"] == {"pallas_tpu"}
    assert of["grouped_matmul"] == {"pallas_gpu", "mosaic_gpu"}
    for (name, what), why in UNSEEN.items():
        assert (KERNELS[name][1], what) in bodies()[name].MUTATIONS
        assert why
