"""Host offload of the state: the same numbers, before and after a restart; and refusals."""

from __future__ import annotations

import dataclasses
import json

import pytest

from jaxllm.config import ConfigError
from jaxllm.optim import ScheduleConfig
from jaxllm.train import train
from jaxllm.train.combinations import check_combinations
from jaxllm.train.host_offload import HostConfig, host_bytes, persistent_arrays
from jaxllm.train.run import Run
from tests.optim.kinds import named
from tests.train.runs import losses, run_config, stopped_at

pytestmark = pytest.mark.usefixtures("shared_programs")


def config(folder, kind="adamw", **fields):
    # MeZO's slope is a small difference of two losses: with large steps rounding would soon be another run.
    run = run_config(folder, **({"schedule": ScheduleConfig(peak=1e-5)} if kind == "mezo" else {}), **fields)
    return dataclasses.replace(
        run,
        model=dataclasses.replace(run.model, layers=3, remat="full"),
        optim=named(kind, schedule=run.optim.schedule),
    )


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize(
    ("kind", "host"),
    [
        ("adamw", HostConfig(optimizer=True)),
        ("adamw", HostConfig(optimizer=True, persistent=0.5)),
        ("adamw", HostConfig(optimizer=True, device_every=2)),
        ("adafactor", HostConfig(optimizer=True)),
        ("lomo", HostConfig(params=True)),
        ("mezo", HostConfig(params=True)),
    ],
)
def test_a_run_is_the_same(tmp_path, kind, host):
    plain = train(config(tmp_path, kind, steps=6, out=tmp_path / "plain"))
    away = dataclasses.replace(config(tmp_path, kind, steps=6), host=host)
    assert host_bytes((Run(away).abstract.params, Run(away).abstract.opt_state)) > 0
    done = train(away)
    assert [step for step, *_ in losses(done.directory)] == [step for step, *_ in losses(plain.directory)]
    # In float64: `make proof optimizers ONLY=zo2_is_mezo_one_update_late`.
    # A small slope of MeZO has the rounding errors of a large one.
    least = 1e-3 * max(norm for *_, norm in losses(plain.directory)) if kind == "mezo" else 0.0
    for (_, loss, norm), (_, other, other_norm) in zip(losses(done.directory), losses(plain.directory), strict=True):
        assert loss == pytest.approx(other, rel=2e-6)
        assert norm == pytest.approx(other_norm, rel=2e-6, abs=least)
    assert done.evaluation
    assert plain.evaluation
    assert done.evaluation.nll == pytest.approx(plain.evaluation.nll, rel=2e-6)


@pytest.mark.drawn(0.3)
def test_a_stopped_run_goes_on_with_its_state_elsewhere(tmp_path):
    """The place of the state is not part of the run: it begins on the device and resumes on the host, but for a
    persistent part."""
    whole = train(run_config(tmp_path, out=tmp_path / "whole"))
    stopped = stopped_at(tmp_path, 6)
    done = train(dataclasses.replace(run_config(tmp_path), host=HostConfig(optimizer=True, persistent=0.4)))
    assert done.directory == stopped
    for one, other in zip(losses(stopped), losses(whole.directory), strict=True):
        assert one == pytest.approx(other, rel=2e-6)
    assert json.loads((stopped / "config.json").read_text())["host"]["optimizer"] is True


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"optim": named("muon"), "host": HostConfig(optimizer=True)}, "choose one of adamw, lion, adafactor, sgd"),
        ({"host": HostConfig(params=True)}, "choose one of lomo, adalomo, mezo"),
        (
            {"optim": named("adamw 8bit"), "host": HostConfig(optimizer=True, device_every=2)},
            "updates moments in float32; give optim.moments",
        ),
    ],
)
def test_what_cannot_wait_on_the_host_is_refused(tmp_path, fields, said):
    with pytest.raises(ConfigError, match=said):
        Run(dataclasses.replace(run_config(tmp_path), **fields))


@pytest.mark.parametrize("remat", ["offload", "compact:0.5", "none=1,offload:0.5=2"])
def test_products_in_a_ring_are_not_kept_so(tmp_path, remat):
    """A ring's matmuls do not go through what saves them, so the setting is refused."""
    run = config(tmp_path)
    run = dataclasses.replace(
        run,
        model=dataclasses.replace(run.model, remat=remat),
        parallel=dataclasses.replace(run.parallel, overlap="ring", sequence=True),
    )
    with pytest.raises(ConfigError, match="is not supported with ring collective matmuls"):
        check_combinations(run, {"tensor": 2})


def test_float16_keeps_its_state_on_the_device(tmp_path):
    run = run_config(tmp_path)
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, dtype="float16"), host=HostConfig(True))
    with pytest.raises(ConfigError, match="a skipped float16 step would need"):
        Run(run)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"device_every": 0}, "give 1"),
        ({"device_every": 2}, "set host.optimizer"),
        ({"optimizer": True, "persistent": 1.0}, "persistent = 1.0; give a share, at least 0 and below 1"),
        ({"persistent": 0.5}, "set host.optimizer to true"),
        ({"optimizer": True, "persistent": 0.5, "device_every": 2}, "give persistent = 0 or device_every = 1"),
    ],
)
def test_strides_are_checked(fields, said):
    with pytest.raises(ValueError, match=said):
        HostConfig(**fields)


def test_the_persistent_share_is_whole_arrays(tmp_path, rng):
    """The largest first, as far as there is room; what is left has no room for the smallest that moves."""
    for _ in range(30):
        sizes, share = rng.integers(1, 100, int(rng.integers(1, 12))).tolist(), float(rng.uniform(0, 1))
        stay = persistent_arrays(sizes, share)
        room = share * sum(sizes) - sum(sizes[n] for n in stay)
        assert room >= 0
        assert all(size > room for n, size in enumerate(sizes) if n not in stay)
        assert not stay or max(sizes[n] for n in stay) == max(size for size in sizes if size <= share * sum(sizes))
    run = dataclasses.replace(config(tmp_path), mesh="fsdp=4,tensor=2")
    state = {
        share: Run(dataclasses.replace(run, host=HostConfig(optimizer=True, persistent=share))).abstract.opt_state
        for share in (0.0, 0.4)
    }
    here = host_bytes(state[0.0]) - host_bytes(state[0.4])
    assert 0.3 * host_bytes(state[0.0]) < here <= 0.4 * host_bytes(state[0.0])
