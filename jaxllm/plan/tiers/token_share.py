"""Token-wise activation offload with a computed share: ``model.remat = "offload:SHARE"`` by formula.

MEMO (arXiv:2407.12117, section 4.1) moves the block's input, the results of attention and the residual stream of all
tokens to the host, and of a share of the tokens the results of matmuls, which are computed again for the others. The
share is the largest whose copies a layer's forward pass hides and which the host's memory holds.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from jaxllm.models.remat import RematError
from jaxllm.plan.formulas.device_work import DeviceWork
from jaxllm.plan.formulas.memory_estimate import predict_work as predict_memory
from jaxllm.plan.formulas.offload_time import block_bytes, largest_share
from jaxllm.plan.formulas.step_time import predict_work
from jaxllm.plan.hardware import Cluster
from jaxllm.plan.remat_solver import SHARE
from jaxllm.train import RunConfig
from sharding import MeshSpec
from sharding.topology import GIB


class TokenShare(NamedTuple):
    """Share of the tokens whose matmul results are moved to the host.

    Attributes:
        hidden: the most that a layer's forward pass hides.
        held: the most that the host's memory holds.
        mandatory, optional: bytes of all layers and micro-batches of a device that are moved for all tokens, and more
            with a share of 1.
    """

    hidden: float
    held: float
    mandatory: float
    optional: float

    @property
    def share(self) -> float:
        """Share that is used, in steps of sixteenths."""
        return math.floor(min(self.hidden, self.held) / SHARE) * SHARE

    @property
    def remat(self) -> str:
        """Value for ``model.remat``."""
        return f"offload:{self.share:g}"

    def __str__(self) -> str:
        """One line for people."""
        size = (self.mandatory + self.share * self.optional) / GIB
        return (
            f"model.remat {self.remat}: the forward pass hides copies of {self.hidden:.0%} of the tokens, the host "
            f"holds {self.held:.0%}; {size:.1f} GiB of the host for each device"
        )


def token_share(run: RunConfig, mesh: MeshSpec, cluster: Cluster, host: float) -> TokenShare:
    """Largest share of tokens whose copies the forward pass hides, and which the host's memory holds.

    Args:
        run: the run, without pipeline stages; its remat is ignored.
        mesh, cluster: of the run.
        host: bytes of the host's memory for each device, optimizer state there included.

    Raises:
        RematError: the host has no room for what is moved for all tokens.
        ConfigError, NotImplementedError: the planner has no formula for the run.
    """
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, remat="offload:0"))
    work = DeviceWork.of(run, mesh)
    memory = predict_memory(work, cluster.topology)
    sizes = {block: block_bytes(work, block) for block in work.blocks}
    mandatory, optional = (sum(count * sizes[block][part] for block, count in work.blocks.items()) for part in (0, 1))
    state = memory.host - mandatory
    room = host - state
    if room < mandatory:
        raise RematError(
            f"token-wise offload of {run.name} moves {mandatory / GIB:.1f} GiB for all tokens, and the host has "
            f"{max(0.0, room) / GIB:.1f} GiB for each device; split the row over more devices, or compute layers again "
            '(model.remat = "full").'
        )
    none = dataclasses.replace(run, model=dataclasses.replace(run.model, remat="none"))
    passes = predict_work(DeviceWork.of(none, mesh), cluster).compute / work.micro_batches
    forward = passes / 3 / run.model.layers  # a third of the arithmetic
    hidden = min(largest_share(*sizes[block], forward, cluster.hardware.host) for block in sizes)
    return TokenShare(hidden, min(1.0, (room - mandatory) / optional), mandatory, optional)
