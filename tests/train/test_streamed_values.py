"""Named values that streamed layers save: the same numbers, no second computation, bytes by formula, errors by name."""

from __future__ import annotations

import dataclasses
import math
import re

import jax
import numpy as np
import pytest

from jaxllm.config import ConfigError
from jaxllm.models import AttentionConfig, MLAConfig, MoeConfig
from jaxllm.models.remat import VALUES, saves_names_alone
from jaxllm.plan.capacity_table import without_files
from jaxllm.plan.formulas.device_work import DeviceWork
from jaxllm.plan.formulas.named_values import saved_by_unit
from jaxllm.train import train
from jaxllm.train.compile_step import step_memory_here
from jaxllm.train.disk.layer_values import LayerValues
from jaxllm.train.disk.saved_inputs import DiskInputs, saved_host_bytes
from jaxllm.train.disk.streamed_bytes import step_traffic
from jaxllm.train.step.routing_losses import RoutingConfig
from sharding import MeshSpec
from tests.train.runs import losses
from tests.train.test_disk import opened, same_bits, saved
from tests.train.test_streamed_parameters import config, steps

__all__ = ["opened", "steps"]

NORMED = AttentionConfig(heads=2, kv_heads=1, head_dim=8, qk_norm="head")
LATENT = MLAConfig(4, 16, 8, nope_dim=8, rope_dim=4, value_dim=8)


def with_remat(run, remat, **disk):
    """The run with a policy, in float64 where that is on."""
    dtype = "float64" if jax.config.jax_enable_x64 else "float32"  # pyright: ignore[reportAttributeAccessIssue]
    model = dataclasses.replace(run.model, remat=remat, dtype=dtype, param_dtype=dtype)
    return dataclasses.replace(run, model=model, disk=dataclasses.replace(run.disk, **disk))


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize(
    ("remat", "fields"),
    [
        ("attention", {}),
        ("save:attention+gate,full=2", {"accumulate": 2, "mesh": "fsdp=2,tensor=2,data=2", "clip_norm": 0.5}),
        (
            "elementwise",
            {
                "mlp": MoeConfig(4, 2, 16),
                "routing": RoutingConfig(balance_loss=0.1, z_loss=0.01),
                "accumulate": 2,
                "mesh": "fsdp=4,context=2",
            },
        ),
    ],
    ids=["attention", "by layers, micro-batches on a mesh", "experts"],
)
def test_saved_values_are_the_recomputed_ones(tmp_path, float64, steps, remat, fields):
    """Losses, gradient norms and parameters of six steps, in float64; files or memory, the same bits."""
    remat = remat.replace("gate,", "gate=4,")
    full = train(with_remat(config(tmp_path, out=tmp_path / "full", **fields), "full"))
    done = train(with_remat(config(tmp_path, out=tmp_path / "host", **fields), remat))
    assert any(steps[-1]._programs.values.values())
    curves = [np.array(losses(one.directory))[:, 1:] for one in (done, full)]
    np.testing.assert_allclose(*curves, rtol=1e-10)
    ours, theirs = saved(done.directory), saved(full.directory)
    for one, other in zip(jax.tree.leaves(ours["params"]), jax.tree.leaves(theirs["params"]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-10)
    disk = with_remat(config(tmp_path, **fields), remat, activations=True, activation_layers=3)
    assert same_bits(saved(train(disk).directory), ours)


@pytest.mark.drawn(1)
def test_bytes_in_files_are_those_of_the_values(tmp_path, opened, steps):
    """Names and bytes of what each layer saves, and what a step reads and writes; the host's memory by formula."""
    run = with_remat(
        config(tmp_path, steps=3, every=9, accumulate=2, batch_size=16),
        "attention=2,save:attention=4",
        activations=True,
    )
    train(run)
    inputs, step = steps[-1].inputs, steps[-1]
    assert isinstance(inputs, DiskInputs)
    rows, length, block = run.data.batch_size // 2, run.data.seq_len, run.model.pattern[0]
    tokens, width, attention = rows * length, run.model.embed_dim, block.attention
    of = {
        "q": attention.heads * attention.head_dim,
        "k": attention.kv_heads * attention.head_dim,
        "v": attention.kv_heads * attention.head_dim,
        "residual": width,
        "gate": block.mlp.hidden,
        "up": block.mlp.hidden,
        "attention": attention.heads * (attention.head_dim + 1),
    }
    values = {0: ("q", "k", "v", "residual", "gate", "up"), 1: ("attention",)}
    for layer, saved_layer in enumerate(inputs._saved):
        kept = values[layer >= 2]
        assert {*saved_layer.labels} == {"hidden states", *(name for value in kept for name in VALUES[value])}
        assert sum(saved_layer.sizes) == 4 * tokens * (width + sum(of[value] for value in kept))
    traffic = step_traffic(opened[-1].param_files, opened[-1].state_files, inputs.sizes)
    row = [row for row in opened[-1].directory.read_metrics() if "nll" in row][-1]
    assert (row["disk_read_bytes"], row["disk_written_bytes"]) == traffic
    sizes = [sum(math.prod(x.shape) * 4 for _, x in step._programs.values[step._of.kind_of(unit)])
             for unit in step._of.params.units]  # fmt: skip
    assert sizes[0] > sizes[2]
    assert saved_host_bytes(run.disk, sizes, 2) == 3 * sizes[0], "the window, of the largest"
    host = dataclasses.replace(run.disk, activations=False)
    assert saved_host_bytes(host, sizes, 2) == 2 * sum(sizes)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("remat", "mesh", "block"),
    [
        ("elementwise", "fsdp=2,tensor=2,data=2", {}),
        ("save:attention+inner=2,full=4", "fsdp=4,context=2", {}),
        ("elementwise", "fsdp=2,tensor=2,data=2", {"mlp": MoeConfig(4, 2, 16, shared=16)}),
        ("save:q_proj+attention+o_proj+down", "data=8", {"norms": "sandwich", "attention": NORMED}),
        ("save:q_latent+kv_latent+kv_up+attention+qkv", "fsdp=4,tensor=2", {"attention": LATENT}),
    ],
    ids=["mesh", "by layers, context", "experts", "norms", "latent attention"],
)
def test_the_planner_has_the_bytes_of_the_programs(tmp_path, remat, mesh, block):
    """Named values in the host's memory: of compiled programs, and by the planner's formula."""
    run = config(tmp_path, mesh=mesh)
    own = dataclasses.replace(run.model.pattern[0], **block)
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, pattern=(own,)))
    full, some = with_remat(run, "full"), with_remat(run, remat)
    compiled = step_memory_here(some)[1] - step_memory_here(full)[1]
    work = DeviceWork.of(without_files(some), MeshSpec.parse(mesh))
    assert compiled == sum(saved_by_unit(work, remat)) - sum(saved_by_unit(work, "full"))


def test_what_is_saved_is_not_computed_again(tmp_path, steps):
    """Matmuls of the backward program: six with weights less where their results are saved, and one of attention, whose
    scores its backward pass computes in any case."""
    counts = {}
    for remat in ("full", "attention", "elementwise"):
        train(with_remat(config(tmp_path, layers=2, steps=1, every=9, mesh="data=8", out=tmp_path / remat), remat))
        (backward,) = steps[-1]._programs.backward.values()
        counts[remat] = len(re.findall(r"= \S+ (?:dot|custom-call)\(", backward.as_text()))
    assert counts["full"] - counts["attention"] == 6
    assert counts["attention"] - counts["elementwise"] == 1


def test_a_value_without_a_name_is_refused():
    """It would be kept beside the named ones, unseen."""

    def layer(own, x):
        return jax.numpy.sin(x @ own), None

    values = LayerValues("layers 0", "attention")
    own = jax.numpy.ones((4, 4))

    def forward(own, x):
        more = jax.numpy.cos(own)  # not an argument of either program
        return values.forward(lambda own, x: layer(own * more, x), own, x, ())

    traced = jax.jit(forward).trace(own, own)
    with pytest.raises(ConfigError, match=r"layers 0: its backward pass reads a value float32\[4,4\] .* does not name"):
        values.names(traced.jaxpr, len(traced.out_info[2]))


@pytest.mark.parametrize(
    ("remat", "legal"),
    [
        ("full", True),
        ("attention=2,full=2", True),
        ("save:qkv", True),
        ("save:qkv@host", False),
        ("none", False),
        ("sqrt", False),
        ("offload:0.5", False),
        ("elementwise=2,compact:0.5=2", False),
    ],
)
def test_policies_that_save_names_alone(remat, legal):
    assert saves_names_alone(remat) == legal
