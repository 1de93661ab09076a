"""Commands that begin: programs compiled ahead, and what is said where a compiler or a device is missing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from jaxllm.cli import guarded, main
from jaxllm.infer import LLM, SamplingParams
from jaxllm.infer.engine_config import serving_config
from sharding.topology import CompilerMissing
from tests import environment


@pytest.mark.drawn(0.3)
def test_a_servers_programs_are_compiled_ahead(finished, tmp_path, monkeypatch, capsys):
    """Another process, with another cache, finds them beside the model; the same sizes are asked of both."""
    folder, sizes = tmp_path / "programs", {"max_sequences": 1, "max_batched_tokens": 16, "max_len": 32}
    options = [word for name, size in sizes.items() for word in (f"--{name.replace('_', '-')}", str(size))]
    assert main(["compile", str(finished / "runs" / "tiny"), "--serve", str(folder), *options]) == 0
    assert "5 programs compiled, 0 were there" in capsys.readouterr().out
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path / "another user"))
    for trusted, loaded in ((True, 5), (False, 0)):
        llm = LLM(
            finished / "runs" / "tiny", serving_config(**sizes, kv_dtype="auto"), manifest=None, programs=folder,
            trust_programs=trusted, background=False,
        )  # fmt: skip
        assert llm.engine.runner.program_cache.counts.loaded == loaded
        llm.generate([5, 6], SamplingParams(max_tokens=3))


def test_a_missing_compiler_is_a_sentence(capsys):
    def compiled() -> int:
        raise CompilerMissing("compiling for v6e:2x4 needs the tpu extra: pip install 'jaxllm[tpu]' (no libtpu)")

    assert guarded(compiled) == 2
    assert capsys.readouterr().err == (
        "error: compiling for v6e:2x4 needs the tpu extra: pip install 'jaxllm[tpu]' (no libtpu)\n"
    )


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_a_device_that_is_not_there_is_a_sentence(platform):
    """JAX raises an assertion or a RuntimeError, by what is installed."""
    code = "import jax; from jaxllm.cli import guarded; raise SystemExit(guarded(lambda: len(jax.devices())))"
    variables = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=variables | {"JAX_PLATFORMS": platform}, cwd=environment.ROOT,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"error: JAX_PLATFORMS={platform}, and this computer has no such device")
    assert "Traceback" not in last
