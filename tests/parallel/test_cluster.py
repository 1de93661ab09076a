"""Cluster environment: process id and number of processes, from the variables of each scheduler."""

from __future__ import annotations

import pytest

from jaxllm.parallel.cluster_environment import ClusterEnvironment, ClusterError, detect, first_host

SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_NTASKS": "16",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    "SLURM_STEP_NODELIST": "gpu[007-008],login",
}
OURS = {"JAXLLM_PROCESSES": "4", "JAXLLM_PROCESS_ID": "3", "JAXLLM_COORDINATOR": "10.0.0.1:1234"}
PLAIN = {"NUM_PROCESSES": "4", "PROCESS_ID": "1", "COORDINATOR_ADDRESS": "host:99"}
TORCHRUN = {"WORLD_SIZE": "4", "RANK": "2", "MASTER_ADDR": "n0", "MASTER_PORT": "29500"}
PODS = {"TPU_WORKER_HOSTNAMES": "a,b,c,d", "TPU_WORKER_ID": "2"}
SLICES = {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1", "MEGASCALE_COORDINATOR_ADDRESS": "first:8080"}
JOBSET = {"JOBSET_NAME": "run", "REPLICATED_JOB_NAME": "w", "JOB_COMPLETION_INDEX": "5", "NNODES": "8"}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, (1, 0, "", None)),
        ({"HOSTNAME": "x", "JOB_COMPLETION_INDEX": "3"}, (1, 0, "", None)),
        (OURS, (4, 3, "10.0.0.1:1234", None)),
        (OURS | {"JAXLLM_LOCAL_DEVICES": "2,3"}, (4, 3, "10.0.0.1:1234", (2, 3))),
        (OURS | SLURM, (4, 3, "10.0.0.1:1234", None)),  # by hand comes first
        (SLURM | {"JAXLLM_PROCESSES": "1"}, (1, 0, "", None)),
        (PLAIN, (4, 1, "host:99", None)),
        ({"JAX_" + name: value for name, value in PLAIN.items()}, (4, 1, "host:99", None)),
        (PLAIN | {"JAX_PROCESS_ID": "1"}, (4, 1, "host:99", None)),
        ({"NUM_PROCESSES": "4", "COORDINATOR_ADDRESS": "h:1", "JOB_COMPLETION_INDEX": "3"}, (4, 3, "h:1", None)),
        ({"NUM_PROCESSES": "1"}, (1, 0, "", None)),
        (TORCHRUN, (4, 2, "n0:29501", None)),
        (TORCHRUN | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, (4, 2, "n0:29501", (0,))),
        ({"WORLD_SIZE": "1", "RANK": "0"}, (1, 0, "", None)),
        (SLURM, (16, 9, "gpu007:61441", (1,))),
        (SLURM | {"CUDA_VISIBLE_DEVICES": "5"}, (16, 9, "gpu007:61441", None)),  # bound by Slurm
        (SLURM | {"CUDA_VISIBLE_DEVICES": ",".join("0123456789abcdef")}, (16, 9, "gpu007:61441", (2, 3))),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1(x16)"}, (16, 9, "gpu007:61441", None)),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1"}, (1, 0, "", None)),
        ({"SLURM_JOB_ID": "1"}, (1, 0, "", None)),
        (PODS, (4, 2, "a:8482", None)),
        (PODS | SLICES, (8, 6, "first:8482", None)),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, (1, 0, "", None)),
        ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, (1, 0, "localhost:8482", None)),
        (JOBSET, (8, 5, "run-w-0-0.run:55527", None)),
        (JOBSET | {"NODE_RANK": "7", "JOB_INDEX": "1"}, (8, 7, "run-w-0-0.run:55527", None)),
        (JOBSET | {"NNODES": "1"}, (1, 0, "", None)),
    ],
)
def test_what_a_scheduler_says(env, expected):
    found = detect(env)
    assert (found.processes, found.rank, found.coordinator, found.local_devices) == expected


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"JAXLLM_PROCESS_ID": "3"}, "JAXLLM_PROCESSES is None"),
        ({"JAXLLM_PROCESSES": "4", "JAXLLM_PROCESS_ID": "0"}, "JAXLLM_COORDINATOR is not set"),
        (OURS | {"JAXLLM_PROCESS_ID": "4"}, "process 4 of 4; processes are numbered from 0 to 3"),
        (OURS | {"JAXLLM_PROCESSES": "four"}, "JAXLLM_PROCESSES is 'four'"),
        (OURS | {"JAXLLM_COORDINATOR": "10.0.0.1"}, "coordinator's address is '10.0.0.1'; write it as HOST:PORT"),
        (OURS | {"JAXLLM_LOCAL_DEVICES": "0-3"}, "JAXLLM_LOCAL_DEVICES is '0-3'"),
        (PLAIN | {"JAX_NUM_PROCESSES": "8"}, "NUM_PROCESSES=4 and JAX_NUM_PROCESSES=8 contradict"),
        ({"PROCESS_ID": "1"}, "NUM_PROCESSES and COORDINATOR_ADDRESS are not set .PROCESS_ID=1.*JAXLLM_PROCESSES=1"),
        ({"WORLD_SIZE": "4", "RANK": "0"}, "MASTER_ADDR and MASTER_PORT are not set"),
        ({"RANK": "0"}, "torchrun: WORLD_SIZE"),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}, "SLURM_NTASKS is 4.*not started by srun"),
        ({k: v for k, v in SLURM.items() if k != "SLURM_PROCID"}, "SLURM_PROCID is not set"),
        (SLURM | {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7,8"}, "9 GPUs, which 8 processes"),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, "TPU_WORKER_ID is not set"),
        (PODS | {"TPU_WORKER_ID": "4"}, "TPU_WORKER_ID is 4, but there are 4 workers"),
        (PODS | SLICES | {"MEGASCALE_SLICE_ID": "2"}, "MEGASCALE_SLICE_ID is 2, but MEGASCALE_NUM_SLICES is 2"),
        (PODS | {"MEGASCALE_NUM_SLICES": "2"}, "MEGASCALE_SLICE_ID and MEGASCALE_COORDINATOR_ADDRESS are not set"),
        ({"JOBSET_NAME": "run"}, "REPLICATED_JOB_NAME and JOB_COMPLETION_INDEX and NNODES are not set"),
        (JOBSET | {"JOB_INDEX": "1"}, "JOB_INDEX is not 0.*NODE_RANK"),
    ],
)
def test_what_is_incomplete_or_contradicts_itself_is_named(env, words):
    with pytest.raises(ClusterError, match=words):
        detect(env)


def test_a_tpu_vm_is_asked_for_its_metadata():
    answers = {
        "agent-worker-number": "1",
        "worker-network-endpoints": "n:x:10.0.0.5,n:y:10.0.0.6",
        "tpu-env": "ACCELERATOR_TYPE: 'v5p-16'\nMEGASCALE_NUM_SLICES: '1'\n",
    }
    found = detect({}, answers.get)
    assert (found.processes, found.rank, found.coordinator) == (2, 1, "10.0.0.5:8482")
    assert detect({}, lambda key: None) == ClusterEnvironment()
    assert detect({"TPU_SKIP_MDS_QUERY": "1"}, answers.get) == ClusterEnvironment()
    two = answers | {
        "tpu-env": "MEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: '1'\nMEGASCALE_COORDINATOR_ADDRESS: 'h:1'"
    }
    found = detect({}, two.get)
    assert (found.processes, found.rank, found.coordinator) == (4, 3, "h:8482")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a", "a"), ("a,b", "a"), ("n[001-4],x", "n001"), ("n[7,9-12]", "n7"), ("n[1-2]-ib,z", "n1-ib"), ("x[3]", "x3")],
)
def test_first_of_slurms_nodes(nodes, first):
    assert first_host(nodes) == first
