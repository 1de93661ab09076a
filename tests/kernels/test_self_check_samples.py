"""Samples of the self-check: every kernel made for a platform takes some of its operation's, forward and backward."""

from __future__ import annotations

import functools
import importlib

import jax
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from pallas_kernels import _self_check
from pallas_kernels._compat import TargetDevice, target_device
from pallas_kernels._dispatch import OPERATIONS, PLATFORMS
from pallas_kernels._self_check import DTYPES, SAMPLES

KINDS = {"gpu": "NVIDIA H100 80GB HBM3", "tpu": "TPU v5 lite", "cpu": "cpu"}
KERNELS = [
    (operation, name)
    for operation in SAMPLES
    for name in importlib.import_module(OPERATIONS[operation]).IMPLEMENTATIONS
    if name in PLATFORMS
]
TAKEN = {"mosaic_gpu": ["bfloat16"], "cudnn": ["bfloat16"]}
"""Dtypes of samples that an implementation takes; of those not named here: all."""


@pytest.fixture(autouse=True)
def libraries(monkeypatch):
    """cuDNN, as where JAX's extra for CUDA is installed."""
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91900)


def takes(implementation, sample):
    """Whether it takes a sample, traced for a device which is not here: nothing is compiled or run."""
    platform = PLATFORMS[implementation]
    device = AbstractDevice(device_kind=KINDS[platform], num_cores=None, platform=platform)
    mesh = AbstractMesh((1,), ("data",), axis_types=(AxisType.Auto,), abstract_device=device)
    run = functools.partial(sample.run, implementation)
    with jax.sharding.use_abstract_mesh(mesh):
        assert target_device() == TargetDevice(platform, KINDS[platform])
        try:
            jax.eval_shape(lambda *arrays: _self_check._results(run, arrays, sample.differentiated), *sample.arrays)
        except NotImplementedError:
            return False
    return True


@pytest.mark.parametrize(("operation", "implementation"), KERNELS)
def test_every_kernel_takes_some(operation, implementation):
    """Otherwise its check says that it takes none of the samples, which is no verdict on its values."""
    samples = importlib.import_module(SAMPLES[operation]).samples
    found = [dtype for dtype in DTYPES if any(takes(implementation, sample) for sample in samples(dtype))]
    assert found == TAKEN.get(implementation, list(DTYPES))
