"""Cluster environment: this process's rank, the number of processes and the coordinator, as the scheduler set them.

    found by     variables                                                                    coordinator
    jaxllm       JAXLLM_COORDINATOR, JAXLLM_PROCESSES, JAXLLM_PROCESS_ID, JAXLLM_LOCAL_DEVICES  as given
    environment  COORDINATOR_ADDRESS, NUM_PROCESSES, PROCESS_ID, each also with JAX_ before it  as given
    torchrun     MASTER_ADDR, MASTER_PORT, WORLD_SIZE, RANK, LOCAL_RANK, LOCAL_WORLD_SIZE       as given, a port above
    gke tpu      TPU_WORKER_HOSTNAMES, TPU_WORKER_ID; MEGASCALE_* for several slices            the first worker
    kubernetes   JOBSET_NAME, REPLICATED_JOB_NAME, JOB_COMPLETION_INDEX, NNODES                 the first pod
    slurm        SLURM_JOB_ID, SLURM_NTASKS, SLURM_PROCID, SLURM_STEP_NODELIST                  the first node
    tpu vm       the metadata server's agent-worker-number, worker-network-endpoints, tpu-env   the first worker

The first that is found counts, in this order: variables set by hand come before those of a scheduler.
"""

from __future__ import annotations

import glob
import os
import re
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Metadata = Callable[[str], str | None]
"""Looks up an attribute of this machine at the cloud's metadata server; None where there is none."""

_TPU_PORT = 8482
_KUBERNETES_PORT = 55527
_ALONE = "To run this process alone, set JAXLLM_PROCESSES=1."


class ClusterError(ValueError):
    """Incomplete or contradictory description of the processes in the environment; the message names the variable."""


@dataclass(frozen=True)
class ClusterEnvironment:
    """Cluster environment of this process.

    Attributes:
        processes: number of processes.
        rank: index of this process, from 0.
        coordinator: ``host:port`` at which process 0 listens; empty for one process.
        local_devices: indices of this process's GPUs on the machine; None for all visible ones.
        found_by: source of the description, for messages.
    """

    processes: int = 1
    rank: int = 0
    coordinator: str = ""
    local_devices: tuple[int, ...] | None = None
    found_by: str = "nothing"

    def __post_init__(self) -> None:
        if self.processes < 1:
            raise ClusterError(f"{self.found_by}: {self.processes} processes; give 1 or more.")
        if not 0 <= self.rank < self.processes:
            raise ClusterError(
                f"{self.found_by}: this is process {self.rank} of {self.processes}; processes are numbered from 0 to "
                f"{self.processes - 1}."
            )
        if self.processes > 1:
            host, _, port = self.coordinator.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 65536:
                raise ClusterError(
                    f"{self.found_by}: the coordinator's address is {self.coordinator!r}; write it as HOST:PORT, the "
                    "address of process 0 and a free port there."
                )

    def __str__(self) -> str:
        if self.processes == 1:
            return "one process"
        return f"process {self.rank} of {self.processes} (by {self.found_by}), coordinator {self.coordinator}"


def detect(env: Mapping[str, str], metadata: Metadata | None = None) -> ClusterEnvironment:
    """Cluster environment that the variables describe; a single process where they describe none.

    Args:
        env: environment variables.
        metadata: looks up attributes at the metadata server of a TPU VM; None elsewhere.

    Raises:
        ClusterError: variables are missing or contradict each other; names them and says what to set.
    """
    for finder in (_jaxllm, _plain, _torchrun, _tpu_pods, _kubernetes, _slurm):
        if (found := finder(env)) is not None:
            return found
    return (metadata and _tpu_vm(env, metadata)) or ClusterEnvironment()


def tpu_metadata(key: str) -> str | None:
    """Metadata attribute of this TPU VM; None on other machines, without any network access."""
    # Device files of the old and the new TPU driver; a machine with GPUs alone has neither.
    if not (glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*")):
        return None
    host = os.environ.get("GCE_METADATA_IP", "metadata.google.internal")
    url = f"http://{host}/computeMetadata/v1/instance/attributes/{key}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.read().decode()
    except OSError:
        return None


# One detection function per scheduler; None if it is not present.


def _jaxllm(env: Mapping[str, str]) -> ClusterEnvironment | None:
    names = ("JAXLLM_PROCESSES", "JAXLLM_PROCESS_ID", "JAXLLM_COORDINATOR")
    if not any(env.get(name) for name in names):
        return None
    if _number(env, names[0]) == 1:
        return ClusterEnvironment(found_by="jaxllm's variables")
    _require(env, names, "the variables JAXLLM_*")
    devices = env.get("JAXLLM_LOCAL_DEVICES")
    if devices and not re.fullmatch(r"\d+(,\d+)*", devices):
        raise ClusterError(f"JAXLLM_LOCAL_DEVICES is {devices!r}; write numbers such as 0,1.")
    return ClusterEnvironment(
        _number(env, names[0]),
        _number(env, names[1]),
        env[names[2]],
        tuple(map(int, devices.split(","))) if devices else None,
        "jaxllm's variables",
    )


def _plain(env: Mapping[str, str]) -> ClusterEnvironment | None:
    names = ("NUM_PROCESSES", "PROCESS_ID", "COORDINATOR_ADDRESS")
    merged: dict[str, str] = {}
    for name in names:
        values = {given: env[given] for given in (name, f"JAX_{name}") if env.get(given)}
        if len(set(values.values())) > 1:
            told = " and ".join(f"{given}={value}" for given, value in values.items())
            raise ClusterError(f"{told} contradict each other; unset one of them.")
        if values:
            merged[name] = next(iter(values.values()))
    if not merged:
        return None
    # In an indexed Kubernetes job the pod's index is the rank.
    if "PROCESS_ID" not in merged and env.get("JOB_COMPLETION_INDEX"):
        merged["PROCESS_ID"] = str(_number(env, "JOB_COMPLETION_INDEX"))
    if merged.get("NUM_PROCESSES") == "1":
        return ClusterEnvironment(found_by="the environment")
    _require(merged, names, "the environment")
    return ClusterEnvironment(
        _number(merged, names[0]), _number(merged, names[1]), merged[names[2]], found_by="the environment"
    )  # fmt: skip


def _torchrun(env: Mapping[str, str]) -> ClusterEnvironment | None:
    names = ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")
    if not any(env.get(name) for name in ("WORLD_SIZE", "RANK")):
        return None
    if env.get("WORLD_SIZE") == "1":
        return ClusterEnvironment(found_by="torchrun's variables")
    _require(env, names, "torchrun")
    local = None
    if env.get("LOCAL_RANK") and _number(env, "LOCAL_WORLD_SIZE", 1) > 1:
        local = _share(env, _number(env, "LOCAL_RANK"), _number(env, "LOCAL_WORLD_SIZE"))
    # torchrun itself listens at MASTER_PORT.
    address = f"{env['MASTER_ADDR']}:{_number(env, 'MASTER_PORT') + 1}"
    return ClusterEnvironment(_number(env, "WORLD_SIZE"), _number(env, "RANK"), address, local, "torchrun's variables")


def _tpu_pods(env: Mapping[str, str]) -> ClusterEnvironment | None:
    """TPU pods of GKE, whose admission webhook sets these variables."""
    hosts = [host for host in env.get("TPU_WORKER_HOSTNAMES", "").split(",") if host]
    if not hosts or (env.get("TPU_WORKER_ID") is None and len(hosts) == 1):
        return None
    _require(env, ("TPU_WORKER_ID",), "TPU_WORKER_HOSTNAMES")
    return _slices(env, hosts, _number(env, "TPU_WORKER_ID"), "TPU_WORKER_ID", "the TPU pod's variables")


def _tpu_vm(env: Mapping[str, str], metadata: Metadata) -> ClusterEnvironment | None:
    """TPU VM of Compute Engine, a single host or one of a slice."""
    if env.get("TPU_SKIP_MDS_QUERY") or (worker := metadata("agent-worker-number")) is None:
        return None
    endpoints = metadata("worker-network-endpoints")
    if not endpoints:
        raise ClusterError("the metadata of this TPU VM has agent-worker-number and no worker-network-endpoints.")
    # Old format: name:id:ip; new format: hostname.
    hosts = [part.split(":")[2] if part.count(":") == 2 else part for part in endpoints.split(",")]
    about = dict(line.split(":", 1) for line in (metadata("tpu-env") or "").splitlines() if ":" in line)
    known = {key.strip(): value.strip().strip("'") for key, value in about.items()} | dict(env)
    number = _number({"agent-worker-number": worker.strip()}, "agent-worker-number")
    return _slices(known, hosts, number, "agent-worker-number", "the TPU VM's metadata")


def _slices(
    env: Mapping[str, str], hosts: list[str], worker: int, name: str, found_by: str
) -> ClusterEnvironment | None:
    """Cluster environment of TPU slices; ``hosts`` are those of one slice, MEGASCALE_* gives the index of several."""
    if not 0 <= worker < len(hosts):
        raise ClusterError(f"{name} is {worker}, but there are {len(hosts)} workers: {', '.join(hosts)}.")
    slices = _number(env, "MEGASCALE_NUM_SLICES", 1)
    coordinator = hosts[0]
    if slices > 1:
        _require(env, ("MEGASCALE_SLICE_ID", "MEGASCALE_COORDINATOR_ADDRESS"), "MEGASCALE_NUM_SLICES")
        coordinator = env["MEGASCALE_COORDINATOR_ADDRESS"].split(":")[0]
    number = _number(env, "MEGASCALE_SLICE_ID", 0)
    if not 0 <= number < slices:
        raise ClusterError(f"MEGASCALE_SLICE_ID is {number}, but MEGASCALE_NUM_SLICES is {slices}.")
    rank = number * len(hosts) + worker
    return ClusterEnvironment(slices * len(hosts), rank, f"{coordinator}:{_TPU_PORT}", found_by=found_by)


def _kubernetes(env: Mapping[str, str]) -> ClusterEnvironment | None:
    """Kubernetes JobSet, whose pods have predictable names; the template of the JobSet sets these variables."""
    if not env.get("JOBSET_NAME"):
        return None
    _require(env, ("REPLICATED_JOB_NAME", "JOB_COMPLETION_INDEX", "NNODES"), "JOBSET_NAME")
    if _number(env, "NNODES") == 1:
        return ClusterEnvironment(found_by="the JobSet's variables")
    if _number(env, "JOB_INDEX", 0) and not env.get("NODE_RANK"):
        raise ClusterError(
            "JOB_INDEX is not 0: with several replicated jobs, set NODE_RANK to the pod's overall index."
        )
    rank = _number(env, "NODE_RANK") if env.get("NODE_RANK") else _number(env, "JOB_COMPLETION_INDEX")
    name = env["JOBSET_NAME"]
    host = f"{name}-{env['REPLICATED_JOB_NAME']}-0-0.{name}"
    return ClusterEnvironment(
        _number(env, "NNODES"), rank, f"{host}:{_KUBERNETES_PORT}", found_by="the JobSet's variables"
    )


def _slurm(env: Mapping[str, str]) -> ClusterEnvironment | None:
    if not env.get("SLURM_JOB_ID") or _number(env, "SLURM_NTASKS", 1) == 1:
        return None
    if not env.get("SLURM_STEP_NODELIST"):
        raise ClusterError(
            f"SLURM_NTASKS is {env['SLURM_NTASKS']}, but there is no SLURM_STEP_NODELIST: this process was not started "
            f"by srun. Start it with `srun jaxllm ...`. {_ALONE}"
        )
    _require(env, ("SLURM_PROCID",), "Slurm")
    # The port depends on the job, so that two jobs on one machine do not collide.
    port = 61440 + _number(env, "SLURM_JOB_ID") % 4096
    tasks = _tasks_per_node(env)
    local = _share(env, _number(env, "SLURM_LOCALID"), tasks) if tasks > 1 and env.get("SLURM_LOCALID") else None
    return ClusterEnvironment(
        _number(env, "SLURM_NTASKS"),
        _number(env, "SLURM_PROCID"),
        f"{first_host(env['SLURM_STEP_NODELIST'])}:{port}",
        local,
        "Slurm's variables",
    )


def first_host(nodes: str) -> str:
    """First host of Slurm's compressed list: ``node[007-015,020],other`` -> ``node007``."""
    if not (found := re.match(r"([^,\[]*)(?:\[([^,\-\]]+)[^\]]*\]([^,\[]*))?", nodes)) or not found[0]:
        raise ClusterError(f"SLURM_STEP_NODELIST is {nodes!r}, which names no node.")
    return found[1] + (found[2] or "") + (found[3] or "")


def _tasks_per_node(env: Mapping[str, str]) -> int:
    """Largest number of tasks on a node: ``4(x2),3`` -> 4."""
    text = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_NTASKS_PER_NODE") or "1"
    return max([int(number) for number in re.findall(r"(?:^|,)(\d+)", text)], default=1)


def _share(env: Mapping[str, str], number: int, processes: int) -> tuple[int, ...] | None:
    """GPUs of process ``number`` of ``processes`` on this machine; None if the scheduler gave each process its own."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return (number,)
    count = len([device for device in visible.split(",") if device])
    if count < processes:
        return None
    if count % processes:
        raise ClusterError(
            f"CUDA_VISIBLE_DEVICES={visible} are {count} GPUs, which {processes} processes on one machine cannot share "
            "evenly; start as many processes as GPUs, or one."
        )
    each = count // processes
    return tuple(range(number * each, (number + 1) * each))


def _require(env: Mapping[str, str], names: tuple[str, ...], what: str) -> None:
    missing = [name for name in names if not env.get(name)]
    if missing:
        there = ", ".join(f"{name}={env[name]}" for name in names if env.get(name))
        raise ClusterError(
            f"{what}: {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set"
            + (f" ({there})" if there else "")
            + f". All of {', '.join(names)} are needed. {_ALONE}"
        )


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = env.get(name)
    if not value and default is not None:
        return default
    if not value or not re.fullmatch(r"\d{1,12}", value):
        raise ClusterError(f"{name} is {value!r}; it must be a number.")
    return int(value)
