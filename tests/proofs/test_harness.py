"""The harness itself: counting, failing, resuming, storing."""

from __future__ import annotations

import io
import json
import math
import os
import warnings

import hypothesis.strategies as st
import hypothesis.vendor.pretty
import jax.numpy as jnp
import pytest
from rich.console import Console

from tests import environment
from tests.proofs import __main__ as cli
from tests.proofs import covered_code, harness, journal, runner, stored
from tests.proofs.harness import Proof, ProofError


def make(trial, *, count=6, sample=2, bound=None, strategy=None, name="case", **options) -> Proof:
    bounds = {} if bound is None else dict(bound) if isinstance(bound, dict) else {"error": bound}
    options = {"chunk": 4, "float64": False, "parallel": True} | options
    count = len(options["cases"]) if "cases" in options else count
    return Proof("toy", name, trial, count, sample, bounds, strategy, **options)


@pytest.fixture
def toy(monkeypatch, tmp_path):
    """Runs the command line on given proofs, with journal and records below tmp_path."""
    opened = journal.Journal.open
    monkeypatch.setattr(journal.Journal, "open", staticmethod(lambda i, s=None: opened(i, s, tmp_path / "journal")))
    monkeypatch.setattr(stored, "FOLDER", tmp_path / "docs")
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setattr(journal, "_code_digest", lambda: "code")
    # The command sets it for its workers.
    monkeypatch.setenv("JAXLLM_SEED", str(environment.seed()))

    def run(*arguments: str, proofs: list[Proof]) -> int:
        monkeypatch.setattr(harness, "load", lambda issue: {p.name: p for p in proofs})
        return cli.main(["toy", *arguments])

    run.record = lambda: json.loads((tmp_path / "docs" / "toy.json").read_text())
    run.stored = lambda: (tmp_path / "docs" / "toy.json").exists()
    return run


def test_seeded_proof_runs_different_seeds_and_keeps_the_worst(toy):
    seeds = []

    def trial(seed):
        seeds.append(seed)
        return seed / 2**40

    assert toy("--seed", "7", proofs=[make(trial, bound=1.0)]) == 0
    assert len(set(seeds)) == 6
    record = toy.record()
    (case,) = record["cases"]
    assert case == case | {"name": "case", "asked": 6, "run": 6, "bound": 1.0, "worst_error": max(seeds) / 2**40}
    assert case["seed"] == 7
    assert {"commit", "dirty", "code", "covers", "versions", "finished", "seconds", "longest"} <= set(case)
    assert {"python", "jax", "jaxlib", "flax"} <= set(case["versions"])


def test_seeds_depend_on_the_seed_only(toy):
    runs = []
    for seed in ("1", "1", "2"):
        runs.append([])
        assert toy("--seed", seed, proofs=[make(runs[-1].append)]) == 0
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.drawn(1)
def test_drawn_proof_counts_distinct_examples(toy):
    drawn = []
    assert toy(proofs=[make(drawn.append, count=30, strategy=st.integers(0, 10**6))]) == 0
    assert len(drawn) == len(set(drawn)) >= 30
    assert toy.record()["cases"][0]["run"] >= 30


def test_exhausted_strategy_is_an_error(toy, capsys):
    assert toy(proofs=[make(lambda _: None, count=30, strategy=st.booleans())]) == 1
    assert "no new examples after 2 of 30" in capsys.readouterr().out
    assert not toy.stored()


def test_listed_cases_run_once_each_and_are_recorded_one_by_one(toy):
    ran = []

    def trial(case):
        ran.append(case)
        return len(case[0])

    cases = (("aa", 1), ("b", 2), ("cccc", 3))
    assert toy(proofs=[make(trial, cases=cases, bound=4.0)]) == 0
    assert ran == list(cases)
    (case,) = toy.record()["cases"]
    assert case == case | {"asked": 3, "run": 3, "worst_error": 4.0, "bound": 4.0}
    assert case["each"] == {"aa / 1": 2.0, "b / 2": 1.0, "cccc / 3": 4.0}


@pytest.mark.drawn(1)
def test_listed_cases_resume_one_by_one(toy):
    ran = []

    def trial(case):
        if len(ran) == 2:
            raise KeyboardInterrupt
        ran.append(case)

    assert toy(proofs=[make(trial, cases=tuple("abcde"))]) == 130
    rest = []
    assert toy(proofs=[make(rest.append, cases=tuple("abcde"))]) == 0
    assert ran + rest == list("abcde")
    assert "each" not in toy.record()["cases"][0]  # there are no errors


@pytest.mark.drawn(1)
def test_a_failing_case_is_seen_again_by_its_number(toy, capsys):
    def trial(case):
        assert case != "c", "this one"

    proofs = [make(trial, cases=tuple("abcde"))]
    assert toy("--seed", "3", proofs=proofs) == 1
    assert "make proof toy SEED=3 ONLY=case UNIT=2" in capsys.readouterr().out
    assert toy("--only", "case", "--unit", "2", proofs=proofs) == 1
    assert "this one" in capsys.readouterr().out
    assert toy("--only", "case", "--unit", "1", proofs=proofs) == 0


def test_seeds_sample_other_cases():
    proof = make(None, cases=tuple(range(10)), sample=2)
    samples = [proof.sampled(seed) for seed in range(60)]
    assert all(len(set(sample)) == 2 for sample in samples)
    assert proof.sampled(7) == samples[7]
    assert {case for sample in samples for case in sample} == set(range(10))
    assert {i for seed in range(20) for i in make(None, cases=tuple("abcd"), quick=(1, 3)).sampled(seed)} == {1, 3}
    assert make(None, sample=2).sampled(7) == [0, 1]
    assert make(None, sample=2, strategy=st.booleans()).sampled(7) == [0]


def test_failing_seed_prints_how_to_see_it_again(toy, capsys):
    def trial(seed):
        assert seed % 4, "divisible"

    proofs = [make(trial, count=100)]
    assert toy("--seed", "3", proofs=proofs) == 1
    output = capsys.readouterr().out
    assert "divisible" in output
    again = output.split("make proof toy ")[1].split()
    assert again[:2] == ["SEED=3", "ONLY=case"]
    unit = again[2].removeprefix("UNIT=")
    assert toy("--seed", "3", "--only", "case", "--unit", unit, proofs=proofs) == 1
    assert not toy.stored()


@pytest.mark.parametrize("printer", ["hypothesis", "none"])
def test_failing_example_is_shrunk(printer, toy, capsys, monkeypatch):
    """The example is printed even if Hypothesis prints nothing, which schemathesis makes of it for a whole process."""
    if printer == "none":
        monkeypatch.setattr(hypothesis.vendor.pretty.RepresentationPrinter, "pretty", lambda *_, **__: None)

    def trial(n):
        assert n < 1000

    assert toy(proofs=[make(trial, count=200, chunk=50, strategy=st.integers(0, 10**9))]) == 1
    printed = capsys.readouterr().out
    assert "example=1000" in printed, printed


def test_resumes_after_a_stop(toy, tmp_path):
    done = []

    def trial(seed):
        if len(done) == 4:
            raise KeyboardInterrupt
        done.append(seed)

    assert toy("--seed", "5", proofs=[make(trial, count=9)]) == 130
    # Killed while writing a line.
    (path,) = (tmp_path / "journal" / "toy").glob("*.jsonl")
    path.write_text(path.read_text() + '\n{"case": "case", "ind')
    before = set(done)
    assert len(before) == 4
    rest = []
    assert toy(proofs=[make(rest.append, count=9)]) == 0  # the unfinished run's seed is found again
    assert len(set(rest)) == 5
    assert not before & set(rest)
    assert toy.record()["cases"][0]["seed"] == 5
    again = []
    assert toy("--seed", "5", proofs=[make(again.append, count=9)]) == 0  # stored: a new run starts afresh
    assert set(again) == before | set(rest)


def test_changed_code_or_seed_starts_afresh(toy, monkeypatch):
    for code, seed in (("a", "1"), ("b", "1"), ("b", "2")):
        monkeypatch.setattr(journal, "_code_digest", lambda code=code: code)
        done = []

        def trial(seed, done=done):
            if len(done) == 2:
                raise KeyboardInterrupt
            done.append(seed)

        assert toy("--seed", seed, proofs=[make(trial)]) == 130
        assert len(done) == 2


def test_one_case_at_a_time_then_stored(toy, capsys):
    proofs = [make(lambda _: None, name="a"), make(lambda _: None, name="b", parallel=False)]
    assert toy("--only", "a", proofs=proofs) == 0
    assert "still lacks:\n  b: is registered, but has no stored result" in capsys.readouterr().out
    assert toy("--only", "b", proofs=proofs) == 0
    assert "lacks" not in capsys.readouterr().out
    assert [case["name"] for case in toy.record()["cases"]] == ["a", "b"]


def test_one_case_again_leaves_the_others_as_they_were(toy, monkeypatch):
    proofs = [make(lambda _: None, name=name) for name in ("a", "b", "gone")]
    assert toy("--seed", "1", proofs=proofs) == 0
    monkeypatch.setattr(journal, "_code_digest", lambda: "new code")
    assert toy("--seed", "2", "--only", "b", proofs=proofs[:2]) == 0
    assert [(c["name"], c["seed"], c["code"]) for c in toy.record()["cases"]] == [
        ("a", 1, "code"),
        ("b", 2, "new code"),
    ]


def test_stale_proofs_are_renewed_and_no_others(toy, monkeypatch, capsys):
    ran = []
    proofs = [make(lambda _, name=name: ran.append(name), count=2, name=name) for name in "abc"]
    monkeypatch.setattr(harness, "issues", lambda: ["toy"])
    code = {"tests.a": "1", "tests.b": "1", "tests.c": "1"}
    monkeypatch.setattr(Proof, "module", property(lambda proof: f"tests.{proof.name}"))
    monkeypatch.setattr(covered_code.Tree, "covers", lambda tree, module: code[module])
    assert toy("--only", "a", proofs=proofs) == 0
    assert toy("--only", "b", proofs=proofs) == 0
    code["tests.b"] = "2"
    monkeypatch.setattr(journal, "_code_digest", lambda: "new code")
    ran.clear()
    assert toy("--stale", proofs=proofs) == 0
    assert ran == ["b", "b", "c", "c"]
    assert {case["name"]: case["covers"] for case in toy.record()["cases"]} == {"a": "1", "b": "2", "c": "1"}
    ran.clear()
    assert toy("--stale", proofs=proofs) == 0
    assert not ran
    assert "all records are current" in capsys.readouterr().out


@pytest.mark.drawn(1)
def test_a_failure_stops_its_trials_but_neither_listed_cases_nor_other_proofs(toy, capsys):
    ran = []

    def trial(case):
        ran.append(case)
        assert case not in ("b", "d")

    trials = []

    def first_fails(seed):
        trials.append(seed)
        raise AssertionError

    other = make(lambda _: None, name="other")
    proofs = [make(trial, name="listed", cases=tuple("abcde")), make(first_fails, name="seeded"), other]
    assert toy("--seed", "1", proofs=proofs) == 1
    assert ran == list("abcde")
    assert len(trials) == 1
    out = capsys.readouterr().out
    assert "ONLY=listed UNIT=1" in out
    assert "ONLY=listed UNIT=3" in out
    assert "3 failed" in out
    assert [case["name"] for case in toy.record()["cases"]] == ["other"]


@pytest.mark.parametrize("error", [2.0, math.nan, math.inf])
def test_error_beyond_its_bound_fails(toy, error):
    assert toy(proofs=[make(lambda _: error, bound=1.0)]) == 1


def test_several_errors_by_name(toy):
    proof = make(lambda seed: {"loss": seed / 2**40, "grads": 0.5}, bound={"loss": 1.0, "grads": 1.0})
    assert toy(proofs=[proof]) == 0
    case = toy.record()["cases"][0]
    assert case["worst_error"]["grads"] == 0.5
    assert case["bound"] == {"loss": 1.0, "grads": 1.0}


@pytest.mark.parametrize("returned", [None, {"loss": 0.0}, {"error": 0.0, "more": 0.0}])
def test_errors_and_bounds_must_agree(toy, capsys, returned):
    assert toy(proofs=[make(lambda _: returned, bound=1.0)]) == 1
    assert "its bounds are ['error']" in capsys.readouterr().out


def test_counts_are_summed_and_have_no_bound(toy, capsys):
    proof = make(lambda seed: {"error": 0.1, "texts": 3}, bound=0.2, counts=("texts",))
    assert toy(proofs=[proof]) == 0
    (case,) = toy.record()["cases"]
    assert case["counts"] == {"texts": 18}
    assert case["worst_error"] == 0.1
    assert toy(proofs=[make(lambda seed: 0.1, bound=0.2, counts=("texts",), name="silent")]) == 1
    assert "does not return its counts ['texts']" in capsys.readouterr().out


def test_float64_and_warnings(toy):
    def trial(_):
        assert jnp.ones(1).dtype == jnp.float64
        with pytest.raises(UserWarning):
            warnings.warn("an error here", stacklevel=1)

    assert toy(proofs=[make(trial, float64=True)]) == 0
    assert jnp.ones(1).dtype == jnp.float32


@pytest.mark.drawn(0.3)
def test_worker_processes(tmp_path):
    """Two spawned workers, on a registered proof shortened to a few trials."""
    proof = harness.load("data")["damaged_files"]  # imports little, takes a moment
    case = runner.Case(make(proof.trial, name=proof.name), [])
    case.proof = Proof(**{**vars(proof), "count": 6})
    log = journal.Journal(tmp_path / "j.jsonl", journal.Origin.here(), 11)
    runner.run([case], log, 2, Console(file=io.StringIO()))
    assert case.run == 6
    assert {unit.index for unit in log.units} == set(range(6))


def test_shortcomings():
    proofs = {"a": make(None, name="a", bound=1.0), "b": make(None, name="b")}
    good_a = {"name": "a", "asked": 6, "run": 6, "worst_error": 0.5, "bound": 1.0}
    good_b = {"name": "b", "asked": 6, "run": 7, "worst_error": None, "bound": None}

    def lacks(*cases):
        return stored.shortcomings({"cases": list(cases)}, proofs)

    assert lacks(good_a, good_b) == []
    assert "has no stored result" in lacks(good_a)[0]
    assert "no longer registered" in lacks(good_a, good_b, good_b | {"name": "c"})[0]
    assert "5 of 6 asked were run" in lacks(good_a | {"run": 5}, good_b)[0]
    assert "6 are registered" in lacks(good_a | {"run": 5, "asked": 5}, good_b)[0]
    assert "exceeds its bound" in lacks(good_a | {"worst_error": 1.5}, good_b)[0]
    assert "exceeds its bound" in lacks(good_a | {"worst_error": math.nan}, good_b)[0]
    assert "errors [] are stored" in lacks(good_a | {"worst_error": None}, good_b)[0]


def test_bad_names(capsys):
    for arguments, message in ((["frist_run"], "there are first_run"), (["first_run", "--only", "x"], "no case 'x'")):
        with pytest.raises(SystemExit):
            cli.main(arguments)
        assert message in capsys.readouterr().err
    with pytest.raises(ProofError, match="sample"):
        harness.proof("first_run", count=3, sample=4)(lambda seed: None)
    with pytest.raises(ProofError, match="sample"):
        harness.proof("first_run", cases="abc", sample=4)(lambda case: None)
    for given in ({}, {"count": 3, "cases": "abc"}, {"cases": "abc", "strategy": st.booleans()}):
        with pytest.raises(ProofError, match="give a count, with or without a strategy, or give cases"):
            harness.proof("first_run", sample=1, **given)(lambda case: None)
    with pytest.raises(ProofError, match="two cases have the same name"):
        harness.proof("first_run", cases=("a", ("a",)), sample=1)(lambda case: None)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux")
def test_workers_do_not_share_cores(monkeypatch):
    taken = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 3, 4, 6, 7})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: taken.append(cores))
    for number in range(2):
        environment.take_cores(number, 2)
    assert taken == [[1, 4, 7], [3, 6]]
    environment.take_cores(0, 6)
    assert len(taken) == 2, "too few cores for one each"
