"""Device kit: slices in order, resumed and stopped in time, their tables; a tiny dry run compiles for an absent GPU."""

from __future__ import annotations

import json

import pytest

from benchmarks.device import __main__ as kit
from benchmarks.device import report, wheels
from benchmarks.device.slices import PARTS, kernels, slices
from pallas_kernels._dispatch import PLATFORMS
from pallas_kernels._self_check import SAMPLES

ABOUT = {"device": "NVIDIA Test", "platform": "gpu", "jax": "1.0", "python": "3.12.1 (main)"}
CASE = "head dim 128, 2 bytes"
BLOCKS = {"blocks": {"kv": 32}, "before": 2e-3, "after": 1e-3}
ROW = {"step_seconds": 0.5, "mfu": 0.4, "peak_bytes": 2**31}
PREDICTED = {"seconds": 0.4, "bytes": 2**30, "copies": 0.2}


def of_gpus():
    """Slices of a GPU."""
    return [one for one in slices() if one.is_for("gpu")]


def verdict(operation="", implementation="", *_):
    """mosaic_gpu and cuDNN take no float32; cuDNN is not installed."""
    errors = {"bfloat16": 1e-3, "float32": 1e-6}
    errors = {} if implementation == "cudnn" else errors if implementation == "pallas_gpu" else {"bfloat16": 2e-3}
    why = "" if errors else "it takes none of the samples: cuDNN not found"
    kernel = {"operation": operation, "implementation": implementation}
    return kernel | {"passed": bool(errors), "why": why, "errors": errors}


def result(name):
    """Figures of a slice, as it would measure them."""
    part, *words = name.split()
    part = part.rstrip(",")
    took = {"offload, remat elementwise": 0.5, "offload, remat offload": 0.55}.get(name, 0.6)
    return {
        "verdict": verdict(*words),
        "tuning": {"case": CASE, "operation": "flash_attention", "kind": "NVIDIA Test"} | BLOCKS,
        "training": {"setting": {"layers": 12}, "row": ROW, "predicted": PREDICTED},
        "decoding": {"tokens_per_second": 1234.0, "roofline": 0.7, "ready": 3.0},
        "offload": {"setting": {"layers": 4}, "row": ROW | {"step_seconds": took}, "predicted": PREDICTED},
    }.get(part, {"rows": [{"contender": "xla", "forward_seconds": 1e-3, "forward_roofline": 0.5, "error": 1e-6}]})


@pytest.fixture
def device(monkeypatch):
    """A device on which each slice takes a minute of a clock of its own; the names of those that ran."""
    ran, clock = [], [0.0]

    def measured(one, tiny, seconds):
        ran.append(one.name)
        clock[0] += 60
        if "fp8" in one.name:
            return {"part": one.part, "seconds": 60.0, "failed": "no float8 here"}
        return {"part": one.part, "seconds": 60.0, "result": result(one.name)}

    monkeypatch.setattr(kit, "here", lambda: ABOUT)
    monkeypatch.setattr(kit, "measured", measured)
    monkeypatch.setattr(kit.time, "monotonic", lambda: clock[0])
    return ran


def test_slices_are_named_once_and_in_order():
    found = slices()
    assert len({one.name for one in found}) == len(found)
    assert [PARTS.index(one.part) for one in found] == sorted(PARTS.index(one.part) for one in found)
    assert {one.part for one in found} == set(PARTS)


def test_every_kernel_of_a_platform_has_a_verdict():
    """Those that are used by name alone too, and none of another platform."""

    def on(platform):
        return [one.name for one in slices() if one.part == "verdicts" and one.is_for(platform)]

    assert {operation for operation, _, _ in kernels()} == set(SAMPLES)
    assert {"verdict flash_attention mosaic_gpu", "verdict flash_attention cudnn"} <= set(on("gpu"))
    assert "verdict grouped_matmul mosaic_gpu" in on("gpu")
    assert "verdict fused_moe pallas_tpu" in on("tpu")
    assert on("cpu") == ["verdict packed_matmul native"]
    for platform in ("gpu", "tpu", "cpu"):
        assert {PLATFORMS[name.split()[-1]] for name in on(platform)} == {platform}


def test_it_stops_in_time_and_goes_on(device, tmp_path, capsys):
    """A slice is not started with less time than it may take; the next call has those that are left."""
    calls = 0
    while kit.main(["--minutes", "9", "--out", str(tmp_path)]):
        calls += 1
        assert calls < 20
    assert calls > 2
    untimed = [one.name for one in of_gpus() if not one.timed]
    assert set(device[: len(untimed)]) == set(untimed), "they run at once, before the others"
    assert sorted(device) == sorted(one.name for one in of_gpus())
    said = capsys.readouterr().out
    assert "slices are left: the same command goes on." in said
    assert said.endswith("everything is measured.\n")
    assert "- training 8b fp8_current: no float8 here" in said
    assert "Of 0.2000 s of copies to the host and back, 75% are hidden." in said


def test_figures_of_another_device_are_not_mixed(device, tmp_path):
    (tmp_path / "device.json").write_text(json.dumps({"about": ABOUT | {"device": "another"}, "slices": {}}))
    with pytest.raises(SystemExit, match="has figures of another, and this is NVIDIA Test"):
        kit.main(["--out", str(tmp_path)])


def test_a_slice_that_takes_too_long_is_repeated_unless_it_had_all_the_time(device, tmp_path, monkeypatch):
    first, second = [one for one in slices() if one.part == "tuning"][:2]
    quick = kit.measured

    def measured(one, tiny, seconds):
        if one.name == second.name:
            raise TimeoutError(one.name)
        return quick(one, tiny, seconds)

    monkeypatch.setattr(kit, "measured", measured)
    kit.main(["--out", str(tmp_path), "--only", f"{first.name},{second.name}"])
    assert list(json.loads((tmp_path / "device.json").read_text())["slices"]) == [first.name]
    kit.main(["--out", str(tmp_path), "--only", f"{first.name},{second.name}"])
    assert "not done in 9 minutes" in (tmp_path / "device.json").read_text()


def test_slices_are_chosen_by_name(device, tmp_path):
    kit.main(["--out", str(tmp_path), "--only", "training 8b *,decoding*batch 1"])
    assert device == ["training 8b bf16", "training 8b fp8_current", "decoding 1b, batch 1"]
    with pytest.raises(SystemExit):
        kit.main(["--out", str(tmp_path), "--only", "training 9b *"])


@pytest.mark.drawn(3)
def test_a_slice_that_fails_says_where(tmp_path):
    """In a process of its own; the last lines of what it said are kept."""
    broken = kit.Slice("kernels", "no such slice", "kernel")
    found = kit.measured(broken, True, 300.0)
    assert "failed" in found
    assert any("Traceback" in line for line in found["trace"])


def test_the_report_writes_the_page_and_the_blocks(device, tmp_path, monkeypatch):
    while kit.main(["--out", str(tmp_path)]):
        pass
    page, stored = tmp_path / "page.md", []
    page.write_text(f"above\n{report.BEGIN}\nold\n{report.END}\nbelow\n")
    monkeypatch.setattr(report.kernel_tuning, "store", lambda *given: stored.append(given))
    report.write(json.loads((tmp_path / "device.json").read_text()), page)
    text = page.read_text()
    assert text.startswith(f"above\n{report.BEGIN}\nNVIDIA Test, jax 1.0, Python 3.12.1.")
    assert text.endswith(f"{report.END}\nbelow\n")
    assert "old" not in text
    assert "| flash_attention | pallas_gpu | chosen | 1.0e-03 | 1.0e-06 |" in text
    assert "| flash_attention | mosaic_gpu | agrees, used by name | 2.0e-03 |  |" in text
    assert "| flash_attention | cudnn | not compared: it takes none of the samples: cuDNN not found |  |  |" in text
    assert "| 124m bf16, 12 layers | 0.5000 | 0.4000 | 40.0% | 2.0 | 1.0 |" in text
    assert f"| {CASE} | kv 32 | 2.000 -> 1.000 |" in text
    assert stored
    for kind, _, [one], version in stored:
        assert version == "1.0"
        assert (kind, one.operation, one.case, one.fields) == ("NVIDIA Test", "flash_attention", CASE, {"kv": 32})
    with pytest.raises(ValueError, match="has no line"):
        report.write({"about": ABOUT, "slices": {}}, tmp_path / "device.json")


def test_wheels_are_what_jax_does_not_bring():
    found = wheels.needed()
    assert {"flax", "optax", "tyro"} <= found.keys()
    assert not {"jax", "jaxlib", "numpy", "scipy", "pytest"} & found.keys()


@pytest.mark.drawn(0.3)
def test_a_tiny_dry_run_compiles(capsys):
    assert kit.main(["--dry-run", "--tiny", "--on", "h100:1x1", "--parts", "kernels"]) == 0
    assert '"pallas_gpu": ' in capsys.readouterr().out


@pytest.mark.drawn(0.3)
def test_a_dry_run_compiles_the_kernels_of_the_target(capsys):
    """One that takes no sample there, since its library is missing say, is no failure: the table says it."""
    arguments = ["--dry-run", "--tiny", "--on", "h100:1x1", "--only", "verdict grouped_matmul *,verdict * cudnn"]
    assert kit.main(arguments) == 0
    out = capsys.readouterr().out
    assert '  verdict grouped_matmul pallas_gpu: {"temporaries": ' in out
    assert '  verdict grouped_matmul mosaic_gpu: {"temporaries": ' in out
    assert "verdict grouped_matmul pallas_tpu" not in out
    assert "verdict flash_attention cudnn: {" in out
