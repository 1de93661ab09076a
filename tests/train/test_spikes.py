"""Loss spikes: detection, actions, and that a resumed run acts the same."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.checkpoint import Checkpointer, MemoryConfig
from jaxllm.config import ConfigError
from jaxllm.data.dataset import TokenDataset
from jaxllm.models import functional
from jaxllm.observe.html_report import html_report, text_report
from jaxllm.observe.run_record import read_record
from jaxllm.optim import OptimConfig
from jaxllm.train import RunConfig, SpikeConfig, SpikesError, train
from jaxllm.train import run as ready
from jaxllm.train.step.loss_spikes import MIN_DEVIATION, init_spike_detector
from tests import tiny
from tests.train.runs import losses, run_config, signal_at

pytestmark = pytest.mark.usefixtures("shared_programs")

SKIP = SpikeConfig("skip", window=4)
BACK = SpikeConfig("rollback", window=4, back=2, pass_over=4)
LOWER = SpikeConfig("lower_rate", window=4, factor=0.25)
BAD = 8
"""The batch that is bad: of the ninth step."""


@pytest.fixture(autouse=True, scope="module")
def compiled_once() -> Iterator[None]:
    """One program for all runs of an action, whose schedules are the same."""
    made, plain = {}, ready.Run.compile_step

    def compile_step(self: ready.Run) -> Any:
        key = dataclasses.replace(self.config.spikes, limit=8), ready.build_value_and_grad
        if key not in made:
            made[key] = plain(self)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ready.Run, "compile_step", compile_step)
        yield


@contextlib.contextmanager
def batches(*order: int, bad: tuple[int, ...] = (BAD,)) -> Iterator[list[int]]:
    """Data whose batches of those numbers have one target alone, the same everywhere, and are in that order if given.

    Yields the numbers of the batches as they are made.
    """
    made, plain = [], TokenDataset.batch_at

    def at(self: Any, step: int, **shard: Any) -> Any:
        number = order[step] if order and step < len(order) else step
        made.append(number)
        batch = plain(self, number, **shard)
        return batch._replace(targets=np.full_like(batch.targets, 279)) if number in bad else batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TokenDataset, "batch_at", at)
        yield made


def run(folder: Path, spikes: SpikeConfig, out: str, **fields: Any) -> Path:
    """The directory of a finished run whose steps have one length, so that schedules count as they are counted here."""
    config = run_config(folder, out=folder / out, spikes=spikes, **{"every": 3} | fields)
    constant = dataclasses.replace(config.optim.schedule, kind="constant", warmup=0.0)
    done = train(dataclasses.replace(config, optim=dataclasses.replace(config.optim, schedule=constant)))
    return done.directory


def leaves(directory: Path, step: int, under: tuple[str, ...] = ("params", "opt_state")) -> dict[str, str]:
    """Hashes of a checkpoint's arrays."""
    with Checkpointer(directory / "checkpoints", read_only=True) as saved:
        found = saved.manifest(step).leaves
        return {path: leaf.hash for path, leaf in found.items() if path.split("/")[0] in under}


def meta(directory: Path) -> dict[str, Any]:
    with Checkpointer(directory / "checkpoints", read_only=True) as saved:
        return saved.read_meta()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spikes")


@pytest.fixture(scope="module")
def skipped(folder: Path) -> Path:
    with batches():
        return run(folder, SKIP, "skipped")


@pytest.fixture(scope="module")
def rolled_back(folder: Path) -> Path:
    with batches():
        return run(folder, BACK, "back")


# What is a spike


def seen(values: list[tuple[float, float]], config: SpikeConfig) -> list[bool]:
    state, out = init_spike_detector(config), []
    for loss, norm in values:
        assert state is not None
        spike, score, state = state.update(config, jnp.float32(loss), jnp.float32(norm), None)
        assert bool(spike) == (float(score) > config.threshold or not math.isfinite(loss + norm))
        out.append(bool(spike))
    return out


def test_the_statistic_is_its_definition(rng):
    """Against numpy, over a window that is full."""
    config = SpikeConfig("skip", window=9, threshold=3.0)
    values = np.exp(0.1 * rng.standard_t(2, size=(200, 2)))
    found, logs = seen(values.tolist(), config), np.log(values.astype(np.float32))
    for n in range(9, 200):
        before = logs[n - 9 : n]
        middle = np.median(before, axis=0)
        deviation = np.maximum(1.4826 * np.median(abs(before - middle), axis=0), MIN_DEVIATION)
        score = np.max((logs[n] - middle) / deviation)
        assert found[n] == (score > 3) or abs(score - 3) < 1e-3
    assert 5 < sum(found) < 60


def test_what_is_no_number_is_one_from_the_first_step():
    assert seen([(math.nan, 1.0), (1.0, math.inf), (1.0, 1.0), (1.0, -math.inf)], SKIP) == [True, True, False, True]


def test_early_steps_falling_losses_and_new_levels_are_none():
    config = SpikeConfig("skip", window=8)
    rising = [(1.0 + n, 1.0) for n in range(4)]
    assert not any(seen(rising, config)), "half of a window is not there yet"
    falling = [(10 * 0.9**n, 3 * 0.8**n) for n in range(40)]
    assert not any(seen(falling, config))
    level = seen([(1.0, 1.0)] * 8 + [(3.0, 1.0)] * 8, config)
    assert level == [False] * 8 + [True] * 5 + [False] * 3, "after more than half a window it is usual"
    assert seen([(1.0, 1.0)] * 8 + [(1.0, 3.0), (1.0, 1.0)], config)[-2:] == [True, False], "of gradients alone"


# What is done


@pytest.mark.drawn(0.3)
def test_a_skipped_step_leaves_what_the_run_without_the_batch_has(skipped, folder):
    """Parameters and the optimizer's state, to the last bit, of twelve steps and of eleven without the batch."""
    with batches(*(n for n in range(20) if n != BAD)):
        without = run(folder, SKIP, "without", steps=11)
    assert leaves(skipped, 12) == leaves(without, 11)
    rows = {row["step"]: row for row in read_record(skipped).steps}
    assert [step for step, row in rows.items() if row["skipped"]] == [BAD + 1]
    assert rows[BAD + 1]["spike"] == 1.0
    assert rows[BAD + 1]["spike_score"] > SKIP.threshold > max(rows[n]["spike_score"] for n in rows if n != BAD + 1)
    assert rows[BAD + 1]["update_norm"] == 0.0
    assert meta(skipped)["spikes"] == [{"step": BAD + 1, "action": "skip", "batch": BAD}]


@pytest.mark.drawn(0.3)
def test_gradients_that_are_no_numbers_are_skipped_and_the_run_goes_on(folder):
    plain = ready.build_value_and_grad

    def poisoned(*run: Any) -> Any:
        def grads(params: Any, batch: Any) -> Any:
            sums, out = plain(*run)(params, batch)
            return sums, jax.tree.map(lambda g: jnp.where(jnp.all(batch.targets == 279), jnp.nan, g), out)

        return grads

    with pytest.MonkeyPatch.context() as patch, batches():
        patch.setattr(ready, "build_value_and_grad", poisoned)
        done = run(folder, dataclasses.replace(SKIP, window=6), "poisoned")
    rows = read_record(done).steps
    assert len(rows) == 12
    assert [row["step"] for row in rows if row["skipped"]] == [BAD + 1]
    assert rows[BAD]["grad_norm"] is None, "JSON has no such number"
    assert all(math.isfinite(row["param_norm"]) for row in rows)


@pytest.mark.drawn(0.3)
def test_rolling_back_is_the_run_whose_data_lacks_the_batches(rolled_back, folder):
    """Spike at step 9, back by 2 to step 6, on without batches 6 to 9."""
    with batches(*(n for n in range(20) if not 6 <= n < 10), bad=()):
        without = run(folder, BACK, "lacking")
    assert leaves(rolled_back, 12) == leaves(without, 12)
    assert losses(rolled_back) == losses(without), "each step once, and none of those that were given up"
    assert meta(rolled_back)["cursor"]["passed"] == [[6, 10]]
    (spike,) = meta(rolled_back)["spikes"]
    assert spike == {"step": 9, "action": "rollback", "to": 6, "from": 6, "batches": [6, 9]}
    assert "passed" not in meta(without)["cursor"]


def test_the_checkpoint_gone_back_to_is_of_no_account(rolled_back, folder):
    """No checkpoint of step 6, but one of step 4: the steps between are repeated exactly."""
    with batches() as made:
        other = run(folder, BACK, "other", **{"every": 4})
    assert leaves(other, 12) == leaves(rolled_back, 12)
    assert losses(other) == losses(rolled_back)
    assert meta(other)["spikes"][0]["from"] == 4
    assert next(n for n in made if n >= 10) == 10


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize(
    ("spikes", "stop"), [(SKIP, 10), (BACK, 7), (BACK, 10), (LOWER, 11)], ids=lambda one: getattr(one, "action", one)
)
def test_a_stopped_run_goes_on_as_one_that_was_not(spikes, stop, folder, tmp_path, request):
    whole = request.getfixturevalue(
        {"skip": "skipped", "rollback": "rolled_back", "lower_rate": "lowered"}[spikes.action]
    )
    with batches():
        with pytest.MonkeyPatch.context() as patch:
            signal_at(patch, stop - 1)
            directory = run(folder, spikes, str(tmp_path))
        assert len(losses(directory)) < 12
        assert run(folder, spikes, str(tmp_path)) == directory
    every = ("params", "opt_state", "spikes", "step")
    assert leaves(directory, 12, every) == leaves(whole, 12, every)
    assert losses(directory) == losses(whole)
    assert meta(directory)["cursor"] == meta(whole)["cursor"]
    steps = [{k: one[k] for k in ("step", "action")} for one in meta(directory)["spikes"]]
    assert steps == [{"step": BAD + 1, "action": spikes.action}]


@pytest.fixture(scope="module")
def lowered(folder: Path) -> Path:
    with batches():
        return run(folder, LOWER, "lowered")


def test_the_rate_is_lower_from_the_spike_on(lowered):
    rates = [row["learning_rate"] for row in read_record(lowered).steps]
    assert rates == pytest.approx([1e-2] * BAD + [2.5e-3] * (12 - BAD))


def test_updates_are_those_of_the_lower_rate(lowered):
    """AdamW without decay: the update is the rate times a direction that depends on gradients alone."""
    rows = read_record(lowered).steps
    assert rows[BAD]["update_norm"] < 0.5 * rows[BAD - 1]["update_norm"]


@pytest.mark.drawn(3)
def test_too_many_spikes_stop_the_run(folder):
    many = dataclasses.replace(SKIP, limit=1)
    with batches(bad=(7, 9)), pytest.raises(SpikesError, match=r"step 10: .* after those of steps 8; 1 in 4 steps"):
        run(folder, many, "many")
    assert read_record(folder / "many" / "tiny").state.startswith("failed: step 10: loss")


def test_a_report_and_the_view_say_so(skipped, rolled_back, folder, capsys):
    assert "spike at step 9: skipped" in text_report(read_record(skipped))
    record = read_record(rolled_back)
    assert "spike at step 9: rolled back to step 6; batches 6 to 9 skipped from step 6 on" in text_report(record)
    assert "spike at step 9: rolled back to step 6" in html_report(record)
    account = record.goodput
    assert account is not None
    assert account.lost > 0
    assert account.starts == 1
    with batches():
        run(folder, BACK, "said")
    assert "step 9: loss spike: loss" in (said := capsys.readouterr().out)
    assert "rolled back to step 6; 4 batches are skipped from step 6 on" in said


# What is refused


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"action": "skip", "window": 1}, "spikes.window = 1; give 2 or more"),
        ({"action": "skip", "threshold": math.nan}, "spikes.threshold"),
        ({"action": "lower_rate", "factor": 1.0}, "between 0 and 1"),
        ({"action": "rollback", "back": 50, "pass_over": 50}, "ends before the spike.*give 51 or more"),
        ({"action": "skip", "back": 50}, '"skip" does not use spikes.back, which is for rollback'),
        ({"action": "rollback", "factor": 0.1}, '"rollback" does not use spikes.factor'),
        ({"window": 64}, '"none" does not use spikes.window'),
    ],
)
def test_numbers_that_mean_nothing_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        SpikeConfig(**fields)


@pytest.mark.parametrize(
    ("action", "changes", "words"),
    [
        ("skip", {"optim": OptimConfig(kind="mezo", clip_norm=None)}, "never holds all gradients"),
        ("lower_rate", {"optim": OptimConfig(kind="sgd", rounding="stochastic")}, "already rounded"),
        ("rollback", {"memory": MemoryConfig()}, "set checkpoint.memory to None"),
    ],
)
def test_what_a_run_cannot_do_is_refused(action, changes, words, tmp_path):
    model = tiny.decoder(dtype="bfloat16" if "rounded" in words else "float32", remat="full")
    config = run_config(tmp_path, model=model, spikes=SpikeConfig(action), **changes)
    with pytest.raises(ConfigError, match=words):
        ready.fitting_mesh(config, functional(config.model, config.parallel.rules()), 1)


def test_a_run_with_no_eye_on_spikes_has_no_state_of_them():
    assert init_spike_detector(SpikeConfig()) is None
    assert RunConfig().spikes.action == "none"
    assert jax.tree.leaves(init_spike_detector(SKIP))
