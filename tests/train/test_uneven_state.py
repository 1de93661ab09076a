"""Uneven optimizer state: the curve and the checkpoints of even shards, bytes by share, resumes with any shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm.checkpoint import Checkpointer
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.train import RunConfig, train
from jaxllm.train.compile_step import state_bytes_here, step_memory_here
from jaxllm.train.disk.config import DiskConfig
from jaxllm.train.disk.step_bytes import shard_bytes
from jaxllm.train.run import Run
from jaxllm.train.run_sharding import sharding_table
from jaxllm.train.unequal.uneven_slices import uneven_cut
from sharding import MeshSpec
from tests.train import runs

pytestmark = pytest.mark.usefixtures("shared_programs")


def saved_hashes(folder: Path, name: str, step: int = runs.STEPS) -> dict[str, Any]:
    """Content hashes of every leaf of a checkpoint, with its shape and dtype."""
    with Checkpointer(folder / "runs" / name / "checkpoints", read_only=True) as checkpointer:
        checkpointer.verify(step)
        return dict(checkpointer.manifest(step).leaves)


@pytest.mark.parametrize(
    ("shape", "spec", "over", "shares", "layer", "dim", "bounds"),
    [
        ((1, 8, 16), (None, None, "tensor"), ("data",), (3, 1), True, 1, (0, 6, 8)),
        ((1, 8, 64), (None, "fsdp", "tensor"), ("data",), (1, 1), True, 2, (0, 16, 32)),
        ((1, 4), (None, "fsdp"), ("data", "fsdp"), (4, 2, 1, 1), True, 1, (0, 2, 3, 4, 4)),
        ((5,), (None,), ("data",), (1, 1), False, 0, (0, 3, 5)),
        ((3,), (None,), ("data",), (1, 1), True, None, (0, 0, 0)),
    ],
)
def test_the_longest_dimension_of_a_shard_is_cut(shape, spec, over, shares, layer, dim, bounds):
    mesh = MeshSpec.parse("data=2,fsdp=2,tensor=2").build(jax.devices())
    cut = uneven_cut(shape, jax.NamedSharding(mesh, jax.P(*spec)), over, shares, layer)
    assert (cut.dim, cut.bounds) == (dim, bounds)
    covered = np.zeros(shape, int)
    boxes = {str(cut.box(mesh, device)): cut.box(mesh, device) for device in mesh.devices.flat}
    for box in boxes.values():
        covered[box] += 1
    np.testing.assert_array_equal(covered, 1)


@pytest.mark.drawn(0.3)
def test_a_run_is_that_of_even_shards_and_resumes_with_any(tmp_path, capsys):
    """Losses, gradient norms and the bytes of every checkpoint, in parts, on disk and in even shards in turn."""
    settings = {"mesh": "data=4,tensor=2", "batch_size": 16, "every": 3}
    shares = [ParallelConfig(state_shares=given) for given in ((3, 3, 1, 1), (1, 5, 2, 1), ())]
    for name, parallel in zip(("uneven", "others", "even"), shares, strict=True):
        assert train(runs.run_config(tmp_path, name=name, parallel=parallel, **settings)).complete
    assert "uneven optimizer state: 0.0, 0.0, 0.0, 0.0 MiB of a device over data" in capsys.readouterr().out
    even, losses = saved_hashes(tmp_path, "even"), runs.losses(tmp_path / "runs" / "even")
    for name in ("uneven", "others"):
        assert saved_hashes(tmp_path, name) == even
        np.testing.assert_allclose(np.array(runs.losses(tmp_path / "runs" / name)), np.array(losses), rtol=1e-6)
    on_disk = {"disk": DiskConfig(str(tmp_path / "disk"))}
    turns = [(3, shares[0], {}), (6, shares[1], {}), (8, shares[2], on_disk), (10, shares[2], {})]
    for step, parallel, more in turns:
        runs.stopped_at(tmp_path, step, name="turns", parallel=parallel, **settings, **more)
    assert train(runs.run_config(tmp_path, name="turns", parallel=shares[0], **settings)).complete
    assert saved_hashes(tmp_path, "turns") == even


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("kind", ["lion", "sgd"])
def test_optimizers_save_what_even_shards_do(tmp_path, kind):
    """Over data and fsdp, with clipped gradients and uneven rows beside."""
    settings = {"mesh": "data=2,fsdp=2,tensor=2", "batch_size": 16, "steps": 4, "kind": kind, "clip_norm": 0.1}
    settings |= {"accumulate": 2}
    for name, shares in (("uneven", (1, 4, 2, 1)), ("even", ())):
        parallel = ParallelConfig(state_shares=shares, zero=1, micro_batches=(3, 2, 1, 2))
        assert train(runs.run_config(tmp_path, name=name, parallel=parallel, **settings)).complete
    assert saved_hashes(tmp_path, "uneven", 4) == saved_hashes(tmp_path, "even", 4)


def test_devices_hold_their_shares(tmp_path):
    """Bytes of live arrays of the state on each device, before and after a step."""
    parallel = ParallelConfig(state_shares=(4, 2, 1, 1), zero=1)
    config = runs.run_config(tmp_path, mesh="data=2,fsdp=2,tensor=2", parallel=parallel, batch_size=16)
    run = Run(config)
    state = run.uneven_state
    assert state is not None
    params = jax.tree.leaves(run.abstract.params)
    whole = 2 * sum(np.prod(x.shape) * x.dtype.itemsize for x in params)
    held = [state.bytes_on(device) for device in run.mesh.devices.flat]
    assert sum(held[::2]) + sum(held[1::2]) >= whole
    assert held[0] > 1.8 * held[2] > 3 * held[4]


@pytest.mark.drawn(0.3)
def test_memory_counts_the_largest_share(tmp_path):
    """Bytes between steps, exactly; of a step at least these, since the largest slice of a unit is larger too."""

    def config_of(*shares: int) -> RunConfig:
        parallel = ParallelConfig(state_shares=shares)
        return runs.run_config(tmp_path, mesh="data=4,tensor=2", batch_size=8, parallel=parallel)

    equal, uneven = config_of(1, 1, 1, 1), config_of(5, 1, 1, 1)
    state = shard_bytes([x for x in jax.tree.leaves(Run(config_of()).abstract.opt_state) if x.ndim])
    more = state_bytes_here(uneven).device - state_bytes_here(equal).device
    assert more == pytest.approx(state * (5 / 8 - 1 / 4), rel=0.02)
    assert state_bytes_here(config_of()).device - state_bytes_here(equal).device == pytest.approx(
        state * 3 / 4, rel=0.02
    )
    assert step_memory_here(uneven)[0] >= step_memory_here(equal)[0] + more
    config = runs.run_config(tmp_path, mesh="data=4,tensor=2", parallel=ParallelConfig(state_shares=(5, 1, 1, 1)))
    assert "uneven optimizer state: 0.0, 0.0, 0.0, 0.0 MiB of a device over data" in sharding_table(config, 8).remark


@pytest.mark.parametrize(
    ("shares", "fields", "message"),
    [
        ((3, 1, 2), {}, "state_shares = 3 1 2 does not go with the mesh 'data=2,fsdp=2' with parallel.zero = 3"),
        ((3, 1, 2, 2), {}, "does not go with the mesh .*parallel.zero = 1 and as many as data x fsdp"),
        ((3, 1), {"kind": "adafactor"}, 'optim.kind = "adafactor".*choose one of adamw, lion, sgd'),
        ((3, 1), {"disk": DiskConfig("files")}, "leave disk.directory empty"),
        ((3, 1), {"mesh": "fsdp=4"}, "one share for each index of data"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, shares, fields, message):
    parallel = ParallelConfig(state_shares=shares)
    config = runs.run_config(tmp_path, **{"mesh": "data=2,fsdp=2", "parallel": parallel, **fields})
    with pytest.raises(ValueError, match=message):
        sharding_table(config, 4)


def test_shares_are_weights():
    with pytest.raises(ValueError, match="state_shares = 3 0; a share is a weight of 1 or more, such as 3 1"):
        ParallelConfig(state_shares=(3, 0))
