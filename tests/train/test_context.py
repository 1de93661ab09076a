"""Context parallelism: the loss and gradients of one device, for every layout and product of axes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm.models import functional
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.train import train, value_and_grad
from jaxllm.train.run import Run
from sharding import MeshSpec, shardings_of
from sharding.state import abstract_params
from tests import quick, tiny
from tests.train import runs

pytestmark = pytest.mark.usefixtures("shared_programs")

SMALL = {"heads": 4, "kv_heads": 2, "head_dim": 4, "embed_dim": 8, "mlp": 8, "vocab_size": 16, "layers": 2}


@functools.cache
def program(config: Any, layout: str, accumulate: int) -> Any:
    """Loss and gradients, compiled once for all tests with the same shapes."""
    return quick.jit(value_and_grad(functional(config), z_loss=0.01, accumulate=accumulate, layout=layout))


def loss_and_grads(config: Any, batch: Any, mesh: str, layout: str = "contiguous", accumulate: int = 1) -> Any:
    model = functional(config)
    built = MeshSpec.parse(mesh).build(jax.devices()[: np.prod([n for _, n in MeshSpec.parse(mesh).axes])])
    abstract = abstract_params(model.abstract(), model.logical_axes(), built, model.rules)
    run = program(config, layout, accumulate)
    with jax.set_mesh(built):
        params = jax.device_put(quick.params(config), shardings_of(abstract))
        spec = model.rules.spec(("batch", "seq"), built)
        sums, grads = run(params, jax.device_put(batch, jax.NamedSharding(built, spec)))
        return jax.device_get((sums, grads))


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        ("context=4", "contiguous"),
        ("context=4", "zigzag"),
        ("data=2,context=2", "striped"),
        ("fsdp=2,context=2,tensor=2", "zigzag"),
        ("context=2,tensor=4", "contiguous"),
        ("context=2,tensor=4", "striped"),
    ],
)
def test_equals_one_device(mesh, layout, rng, float64):
    """Each layout on each side of a mesh; all meshes of eight devices: tests/proofs/parallelism/parity.py."""
    packed = bool(rng.integers(2))
    window = [None, 3, 7][rng.integers(3)]
    config = tiny.decoder(**SMALL, window=window, logit_softcap=3.0, qk_norm="all")
    batch = tiny.batch(int(rng.integers(2**16)), 4, 16, 16, packed=packed, padding=packed)
    one = loss_and_grads(config, batch, "data=1")
    many = loss_and_grads(config, batch, mesh, layout)
    assert tiny.leaf_error(many, one) < 1e-10


@pytest.mark.drawn(0.3)
def test_accumulation(float64):
    config = tiny.decoder(**SMALL)
    batch = tiny.batch(3, 4, 8, 16, packed=True, padding=True)
    one = loss_and_grads(config, batch, "data=1")
    assert tiny.leaf_error(loss_and_grads(config, batch, "context=2,tensor=2", "zigzag", 2), one) < 1e-10


@pytest.mark.drawn(0.3)
def test_a_run_goes_on_with_its_sequence_split(stopped, finished, tmp_path):
    """The mesh and the layout are no part of the mathematics: the curve is that of one device to float32's rounding."""
    config = runs.run_config(finished, out=tmp_path, mesh="context=4,data=2", parallel=ParallelConfig(layout="striped"))
    assert train(config).complete
    whole, split = (np.array(runs.losses(d))[:, 1] for d in (finished / "runs" / "tiny", tmp_path / "tiny"))
    np.testing.assert_allclose(split, whole, rtol=1e-4)


def test_rows_that_do_not_divide_are_refused(tmp_path):
    base = runs.run_config(tmp_path, mesh="context=4,data=2", seq_len=12)
    with pytest.raises(ValueError, match="zigzag: a sequence of 12 does not divide into 8 parts"):
        Run(base)
    Run(dataclasses.replace(base, parallel=ParallelConfig(layout="contiguous")))
