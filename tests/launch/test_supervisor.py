"""Supervisor over small programs: what it restarts, what it does not, which signals it forwards."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxllm.cli import main
from jaxllm.parallel.supervisor import ProcessSpec, RestartPolicy, Supervisor, describe_exit, local_processes

QUICK = RestartPolicy(restarts=5, pause=0.02, longest=0.05, grace=5.0)


def script(text: str) -> tuple[str, ...]:
    return ("bash", "-c", text)


def supervised(processes: list[ProcessSpec], patience: RestartPolicy = QUICK) -> tuple[int, list[str]]:
    """Exit status and output."""
    said: list[str] = []
    return Supervisor(lambda: processes, patience, said.append).run(), said


def lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


@pytest.mark.parametrize("status", [2, 128 + signal.SIGTERM])
def test_a_wanted_end_is_not_restarted_though_another_process_notices_it_first(tmp_path, status):
    """A process that loses the one that ends may itself be gone before that one is."""
    commands = [f"echo >> {tmp_path}/starts; exit 1", f"sleep 0.4; exit {status}"]
    got, said = supervised([ProcessSpec(script(text)) for text in commands])
    assert got == status
    assert len(lines(tmp_path / "starts")) == 1
    assert "not restarted" in said[-1]
    assert "process 1" in said[-1]


def test_all_that_end_well_are_left_alone(tmp_path):
    status, said = supervised([ProcessSpec(script(f"echo {n} >> {tmp_path}/{n}")) for n in range(3)])
    assert (status, said) == (0, [])
    assert [lines(tmp_path / str(n)) for n in range(3)] == [["0"], ["1"], ["2"]]


@pytest.mark.parametrize(
    ("how", "what"), [("exit 75", "ended with status 75"), ("kill -9 $$", "was killed by SIGKILL")]
)
def test_all_start_again_when_one_is_lost(tmp_path, how, what):
    """The second fails at its first two starts; the first would never end by itself."""
    (tmp_path / "a").touch()
    # It fails only when the other has begun too.
    begun = f"while [ $(wc -l < {tmp_path}/a) -lt $(wc -l < {tmp_path}/b) ]; do sleep 0.05; done"
    failing = f"echo x >> {tmp_path}/b; {begun}; [ $(wc -l < {tmp_path}/b) -gt 2 ] || {{ {how}; }}"
    waiting = f"echo x >> {tmp_path}/a; while [ $(wc -l < {tmp_path}/a) -le 2 ]; do sleep 0.05; done"
    patience = RestartPolicy(restarts=5, pause=0.02, longest=0.05, grace=0.1)
    status, said = supervised([ProcessSpec(script(waiting)), ProcessSpec(script(failing))], patience)
    assert status == 0
    assert [lines(tmp_path / name) for name in "ab"] == [["x"] * 3] * 2
    assert len(said) == 2
    assert all(f"process 1 {what}" in line for line in said)


def test_a_mistake_of_the_user_is_not_repeated(tmp_path):
    log = tmp_path / "log"
    status, said = supervised(
        [ProcessSpec(("true",)), ProcessSpec(script("echo error: no such recipe; exit 2"), log=log)]
    )
    assert status == 2
    assert any("error: no such recipe" in line for line in said), "what the log says is shown"
    assert "not restarted" in said[-1]


def test_it_gives_up(tmp_path):
    status, said = supervised(
        [ProcessSpec(script(f"echo x >> {tmp_path}/n; kill -9 $$"))], RestartPolicy(2, 0.01, 0.02)
    )
    assert status == 128 + signal.SIGKILL
    assert len(lines(tmp_path / "n")) == 3
    assert "giving up after 2 restarts in a row" in said[-1]


def test_a_long_life_forgives_failures(tmp_path):
    """Two restarts in a row are allowed, and each run counts as long: six starts are made."""
    text = f"echo x >> {tmp_path}/n; [ $(wc -l < {tmp_path}/n) -gt 5 ] || exit 1"
    status, _ = supervised([ProcessSpec(script(text))], RestartPolicy(restarts=1, pause=0.0, healthy=0.0))
    assert (status, len(lines(tmp_path / "n"))) == (0, 6)


def test_pauses_double_up_to_the_longest():
    patience = RestartPolicy(pause=5, longest=60)
    assert [patience.wait(failures) for failures in range(1, 7)] == [5, 10, 20, 40, 60, 60]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_is_passed_on_and_waited_for(tmp_path, number):
    """The processes take their time to save, longer than the grace; nothing is started again."""
    child = (
        "import pathlib, signal, sys, time\n"
        f"def stop(n, f): time.sleep(0.3); pathlib.Path('{tmp_path}/saved' + sys.argv[1]).touch(); sys.exit(128 + n)\n"
        f"signal.signal({int(number)}, stop); pathlib.Path('{tmp_path}/up' + sys.argv[1]).touch(); time.sleep(60)\n"
    )
    mine = f"""
from jaxllm.parallel.supervisor import *
make = lambda: [ProcessSpec(({sys.executable!r}, "-c", {child!r}, str(n))) for n in range(2)]
raise SystemExit(Supervisor(make, RestartPolicy(grace=0.1)).run())
"""
    process = subprocess.Popen([sys.executable, "-c", mine], cwd=Path(__file__).parents[2])
    while not all((tmp_path / f"up{n}").exists() for n in range(2)):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    assert all((tmp_path / f"saved{n}").exists() for n in range(2))


def test_a_process_that_was_stopped_by_hand_stays_stopped():
    """Its status says that it has saved; the stop was requested."""
    status, said = supervised([ProcessSpec(script("exit 143"))])
    assert status == 143
    assert "not restarted" in said[0]


def test_processes_of_one_machine_find_each_other(monkeypatch, rng):
    from jaxllm.parallel.cluster_environment import detect

    number = random.Random(int(rng.integers(2**32))).randint(2, 9)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    found = local_processes(["x"], number, devices=2)
    clusters = [detect(dict(each.environment)) for each in found]
    assert [each.rank for each in clusters] == list(range(number))
    assert {each.processes for each in clusters} == {number}
    assert len({each.coordinator for each in clusters}) == 1
    assert [each.local_devices for each in clusters] == [(2 * n, 2 * n + 1) for n in range(number)]
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert local_processes(["x"], 2, devices=3)[1].environment["JAX_NUM_CPU_DEVICES"] == "3"
    with pytest.raises(ValueError, match="give 1 or more"):
        local_processes(["x"], 0)


def test_a_dry_run_prints_lines_of_a_shell_that_do_it(tmp_path, capfd):
    """The printed lines, given to bash, do the same as the launcher."""
    words = [
        "bash",
        "-c",
        f'echo "$JAXLLM_PROCESS_ID of $JAXLLM_PROCESSES: $0" >> {tmp_path}/$JAXLLM_PROCESS_ID',
        "a 'b'",
    ]
    assert main(["launch", "local", "-n", "2", "--logs", str(tmp_path / "logs"), "--dry-run", "--", *words]) == 0
    printed = capfd.readouterr().out
    assert not list(tmp_path.glob("[01]"))
    (tmp_path / "logs").mkdir()
    assert subprocess.run(["bash", "-eu"], input=printed, text=True, check=True).returncode == 0
    assert [lines(tmp_path / str(n)) for n in range(2)] == [["0 of 2: a 'b'"], ["1 of 2: a 'b'"]]
    assert main(["launch", "local", "-n", "2", "--logs", str(tmp_path / "logs"), "--", *words]) == 0
    assert [len(lines(tmp_path / str(n))) for n in range(2)] == [2, 2]


def test_commands_of_ours_run_with_this_python(capsys):
    assert main(["launch", "supervise", "--dry-run", "--", "train", "quickstart", "--name", "x y"]) == 0
    assert capsys.readouterr().out == f"{sys.executable} -P -m jaxllm.cli train quickstart --name 'x y'\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["locally"], "unknown launcher 'locally'"),
        (["local", "-n", "2"], "no command to run"),
        (["local", "-n", "0", "--", "true"], "give 1 or more"),
        (["local", "-n", "2", "--patience.pause", "-1", "--", "true"], "pause = -1"),
    ],
)
def test_what_cannot_be_launched_is_refused(words, message, capsys):
    try:
        status = main(["launch", *words])
    except SystemExit as end:  # an option that the parser refuses
        status = end.code
    assert status == 2
    assert message in "".join(capsys.readouterr())


def test_statuses_in_words():
    assert describe_exit(3) == "ended with status 3"
    assert describe_exit(-15) == "was killed by SIGTERM"
    assert describe_exit(-os.sysconf("SC_RTSIG_MAX") - 100).startswith("was killed by signal")
