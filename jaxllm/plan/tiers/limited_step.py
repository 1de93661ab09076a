"""Step of a run under a memory limit: its predicted seconds, and how many of them the limit costs.

Without a limit every layer keeps what its backward pass reads, and the train state is on the device. A limit costs
recomputation, copies of activations and of optimizer state to the host and back, and files, as far as the passes do
not hide them. All is by formula; nothing is compiled.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from jaxllm.plan.capacity_table import FileTraffic, disk_seconds, file_traffic
from jaxllm.plan.formulas.device_work import DeviceWork
from jaxllm.plan.formulas.step_time import predict_work
from jaxllm.plan.hardware import Cluster
from jaxllm.plan.remat_solver import HostTier
from jaxllm.train import RunConfig
from jaxllm.train.disk.config import DiskConfig
from jaxllm.train.host_offload import HostConfig
from jaxllm.train.model_flops import hardware_flops_per_token, train_flops_per_token
from sharding import MeshSpec


class MovedBytes(NamedTuple):
    """Bytes that a step of a run moves to other tiers.

    Attributes:
        activations: of a micro-batch, from a device to its host's memory; of streamed layers, whose inputs are copied
            beside the passes, 0.
        host: optimizer state of a device in the host's memory.
        files: a device's share of the files of the state, without saved activations.
    """

    activations: float = 0.0
    host: float = 0.0
    files: float = 0.0


class LimitedStep(NamedTuple):
    """Predicted seconds of a step, by what they are.

    Attributes:
        unlimited: with nothing recomputed or moved.
        recomputed: of recomputation.
        activations: copies of activations to the host and back that the passes do not hide; of streamed layers what
            the link takes for them longer than files do.
        state: copies of optimizer state from and to the host.
        files: of files, beside the passes; a backward pass that is made again for them included.
    """

    unlimited: float
    recomputed: float = 0.0
    activations: float = 0.0
    state: float = 0.0
    files: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return sum(self)

    @property
    def ratio(self) -> float:
        """Time of the step over that without a limit."""
        return self.seconds / self.unlimited

    def __str__(self) -> str:
        """Two lines for people, in milliseconds."""
        head = f"predicted: {1e3 * self.seconds:.1f} ms a step, {self.ratio:.2f} times as long as without a limit "
        names = {
            "recomputed": "recomputation",
            "activations": "activations to the host and back",
            "state": "optimizer state from and to the host",
            "files": "files",
        }
        parts = [f"{said} {1e3 * getattr(self, name):.1f}" for name, said in names.items() if getattr(self, name)]
        return f"{head}({1e3 * self.unlimited:.1f} ms)\n  {', '.join(parts) or 'nothing is recomputed or moved'}"


def limited_step(run: RunConfig, moved: MovedBytes, mesh: MeshSpec, cluster: Cluster) -> LimitedStep:
    """Predicted step of a run whose layers keep or compute again what ``model.remat`` says.

    The planner has formulas for steps in which every layer keeps everything, and its input alone; between them time is
    linear in what is computed again.

    Args:
        run: the run; its mesh is legal on the cluster.
        moved: bytes of other tiers.
        mesh, cluster: of the run.

    Raises:
        ConfigError, NotImplementedError: the planner has no formula for the run.
    """
    in_memory = dataclasses.replace(run, disk=DiskConfig(), host=HostConfig())

    def with_remat(remat: str) -> RunConfig:
        return dataclasses.replace(in_memory, model=dataclasses.replace(run.model, remat=remat))

    work = DeviceWork.of(with_remat("none"), mesh)
    none, full = (predict_work(DeviceWork.of(with_remat(one), mesh), cluster).seconds for one in ("none", "full"))
    length = run.data.seq_len
    flops = train_flops_per_token(run.model, length)
    own, most = (
        hardware_flops_per_token(dataclasses.replace(run.model, remat=remat), length) - flops
        for remat in (run.model.remat, "full")
    )
    again = max(0.0, full - none) * own / most
    tier = HostTier.of(in_memory, cluster, mesh, 0)
    exposed = work.micro_batches * tier.exposed(moved.activations, flops / 3, 2 * flops / 3 + own)
    files = 0.0
    if run.disk.parameters:
        traffic = file_traffic(run, mesh, cluster)._replace(backward=moved.files, written=moved.files)
        passes = full / 4, none + again - full / 4
        files = disk_seconds(traffic._replace(away=0), cluster.hardware, *passes)
        exposed = disk_seconds(traffic, cluster.hardware, *passes) - files
    elif run.disk.directory:
        files = disk_seconds(FileTraffic(0, moved.files, 0, moved.files, 0), cluster.hardware, 0, 0)
    return LimitedStep(none, again, exposed, moved.host * tier.seconds_per_byte, files)
