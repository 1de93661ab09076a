"""Host offload in programs of the TPU compiler: bytes, copies, and the computation that overlaps with them."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax

from jaxllm.compiler.aot import CompileReport
from jaxllm.data import DataConfig
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MlpConfig, functional
from jaxllm.train import RunConfig
from jaxllm.train.compile_step import compile_for
from jaxllm.train.host_offload import HostConfig
from jaxllm.train.step.zo2 import PendingUpdate
from tests.optim.kinds import named
from tests.proofs.harness import proof

ON, DEVICES = "v5e:2x2", 4
LAYERS, WIDTH, ROWS, LENGTH = 8, 512, 8, 1024
TOKENS = ROWS * LENGTH // DEVICES
SCALAR = 512
"""Bytes that a scalar takes in the memory of a TPU."""


class Case(NamedTuple):
    """A way to offload, and the plain way beside it.

    Attributes:
        remat, kind, host: of the run.
        plain: its ``remat``, with nothing on the host.
        down, up: how often what waits there is copied to the device in a step, and back.
        exposed: largest share of the bytes copied that nothing runs beside.
    """

    remat: str
    kind: str
    host: HostConfig
    plain: str
    down: float
    up: float
    exposed: float


STATE = HostConfig(optimizer=True)
CASES = {
    # Beside the first layer's copies to the host, and the last's back, runs what is before and after the loops.
    "activations": Case("offload", "adamw", HostConfig(), "elementwise", 1, 1, 1 / LAYERS),
    "activations of half the tokens": Case("offload:0.5", "adamw", HostConfig(), "elementwise", 1, 1, 1 / LAYERS),
    # A layer's state comes and goes beside the update of another one; each way once more than there are layers.
    "optimizer": Case("full", "adamw", STATE, "full", 1 + 1 / LAYERS, 1 + 1 / LAYERS, 1 / LAYERS),
    "optimizer, every other layer by the host": Case(
        # Up go the state of the device's layers, and parameters and gradients of the host's: as many numbers.
        *("full", "adamw", dataclasses.replace(STATE, device_every=2), "full"),
        *(1 / 2 + 1 / LAYERS, 1 / 2 + 1 / 2 + 1 / LAYERS, 0.01),
    ),
    "parameters of lomo": Case("full", "lomo", HostConfig(params=True), "full", 2, 1, 0.05),
    # Both forward passes and the update of the step before while a layer is on the device (ZO2).
    "parameters of mezo": Case("full", "mezo", HostConfig(params=True), "full", 1, 1, 0.05),
}

# What is persistent is not copied.
PERSISTENT = CASES["optimizer"]._replace(host=dataclasses.replace(STATE, persistent=0.45))


def run(remat: str, kind: str, host: HostConfig) -> RunConfig:
    """A mesh that splits rows and weights."""
    block = BlockConfig(AttentionConfig(4, 4, WIDTH // 4), MlpConfig(4 * WIDTH))
    model = DecoderConfig(
        vocab_size=1024, embed_dim=WIDTH, layers=LAYERS, pattern=(block,), dtype="bfloat16", remat=remat
    )
    data = DataConfig(batch_size=ROWS, seq_len=LENGTH)
    return RunConfig(model=model, optim=named(kind), data=data, mesh=f"fsdp={DEVICES}", host=host, steps=10)


@functools.cache
def compiled(remat: str, kind: str, host: HostConfig) -> CompileReport:
    """The step."""
    return compile_for(run(remat, kind, host), ON)


def waiting(case: Case) -> int:
    """Bytes of a device's part of what waits on the host, by formula."""
    if case.remat.startswith("offload"):
        share = float(case.remat.partition(":")[2] or 1)
        of_all, of_some, sums = 3 * WIDTH, 3 * WIDTH + 2 * 4 * WIDTH, 4
        return LAYERS * TOKENS * (2 * of_all + 4 * sums) + LAYERS * round(share * TOKENS) * 2 * of_some
    block = BlockConfig(AttentionConfig(4, 4, WIDTH // 4), MlpConfig(4 * WIDTH))
    model = functional(DecoderConfig(vocab_size=1024, embed_dim=WIDTH, layers=LAYERS, pattern=(block,)))
    if case.host.persistent:
        # Of two moments of four matrices of W x W and three of W x 4 W, which are 32 W^2, 14.4 W^2 may stay: three of
        # the large ones, two of the small ones, and the norms.
        return LAYERS * 18 * WIDTH * WIDTH * 4 // DEVICES
    layers = sum(4 * math.prod(leaf.shape) for leaf in jax.tree.leaves(model.abstract()["segments"])) // DEVICES
    return layers * (2 if case.host.optimizer else 1)


BOUND = {"host": 0.0, "down": 0.01, "up": 0.01, "stays on the device": 0.005, "exposed": 0.0}


@proof("policies", cases=["optimizer"], sample=1, bound=BOUND)
def persistent_state_is_not_copied(name: str) -> dict[str, Any]:
    """The same errors as of ``offload``, where a part of the optimizer state is persistent."""
    return errors_of(PERSISTENT)


@proof("policies", cases=list(CASES), sample=1, bound=BOUND)
def offload(name: str) -> dict[str, Any]:
    """Bytes on the host and copied as predicted; the device keeps at most three layers'; copies overlap with compute.

    The errors: of the bytes on the host; of those copied each way; what the device's memory falls short by; what share
    of the copies over the one that is said nothing runs beside. Beside three layers' state the device may have a few
    buffers more (half a per cent): what the host's layers send and receive.
    """
    return errors_of(CASES[name])


def errors_of(case: Case) -> dict[str, Any]:
    """Errors of a case, see ``offload``."""
    report = compiled(case.remat, case.kind, case.host)
    plain = compiled(case.plain, case.kind, HostConfig())
    want = waiting(case)
    activations = case.remat.startswith("offload")
    pending = SCALAR * len(PendingUpdate._fields) * (case.kind == "mezo")
    found = report.host_bytes if activations else plain.argument_bytes - (report.argument_bytes - pending)
    saved = plain.total_bytes - report.total_bytes
    kept = waiting(case._replace(remat="offload")) if activations else want  # "elementwise" keeps those of all tokens
    sent = {to: sum(row.total_bytes for row in report.transfers if row.to == to) for to in ("device", "host")}
    alone = sum(row.total_bytes for row in report.transfers if not row.beside) / sum(sent.values())
    return {
        "host": abs(found / want - 1),
        "down": abs(sent["device"] / (case.down * want) - 1),
        "up": abs(sent["host"] / (case.up * want) - 1),
        "stays on the device": max(0.0, 1 - saved / (kept * (1 - 3 / LAYERS))),
        "exposed": max(0.0, alone - case.exposed),
    }
