"""Samples of proofs: their order, and the time budget that ends them, with trials that take no time."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest

from tests import conftest
from tests.proofs import sampling
from tests.proofs.harness import Proof, Unit
from tests.proofs.sampling import Budget


def make(name: str, sample: int = 1, strategy=None) -> Proof:
    return Proof("toy", name, lambda _: None, 100, sample, {}, strategy, 20, False, True)


def ran(
    proofs: dict[str, float], tmp_path, minutes: float, seed: int = 1, expected=None, changed=()
) -> dict[str, float]:
    """Name -> seconds of what a run samples of proofs that take these seconds a unit."""
    budget = Budget(tmp_path / f"ledger{len(list(tmp_path.iterdir()))}", 60 * minutes)
    took: dict[str, float] = {}
    for proof in sampling.order([make(name) for name in proofs], seed, {f"toy/{n}" for n in changed}, {}):

        def run(proof, seed, index, examples):
            took[proof.name] = took.get(proof.name, 0.0) + proofs[proof.name]
            return Unit(proof.name, index, 1, {}, proofs[proof.name])

        sampling.sample(proof, seed, budget, (expected or proofs)[proof.name], run)
    return took


def test_changed_proofs_come_first_then_those_sampled_longest_ago():
    proofs = [make(name) for name in "abcdefgh"]
    log = {"toy/a": {"at": 30.0}, "toy/b": {"at": 20.0}, "toy/c": {"at": 10.0}}
    changed = {"toy/a", "toy/d", "toy/h"}
    orders = [[p.name for p in sampling.order(proofs, seed, changed, log)] for seed in range(20)]
    for order in orders:
        assert set(order[:3]) == set("adh")
        assert order[2] == "a"
        assert order[6:] == ["c", "b"]
    assert len({tuple(order) for order in orders}) > 5
    assert orders[3] == [p.name for p in sampling.order(proofs[::-1], 3, changed, log)]


@pytest.mark.parametrize("dummies", [0, 40, 400])
def test_more_proofs_take_no_more_time(tmp_path, dummies):
    """A hundred proofs of all sizes, and others that take ten seconds each."""
    proofs = {f"p{i}": 0.5 * 1.06**i for i in range(100)} | {f"dummy{i}": 10.0 for i in range(dummies)}
    for seed in range(5):
        took = ran(proofs, tmp_path, 4, seed)
        assert 0.95 * 240 < sum(took.values()) <= 240
        costly = sum(took for took in took.values() if took > sampling.COSTLY)
        assert costly <= 120
    never = {name for name, seconds in proofs.items() if seconds > 120}
    assert not never & set(took)


def test_samples_end_with_the_unit_that_is_longer_than_expected(tmp_path):
    proofs = {f"p{i}": 30.0 for i in range(40)}
    took = ran(proofs, tmp_path, 4, expected=dict.fromkeys(proofs, 1.0))
    assert sum(took.values()) <= 240 + 30


def test_costly_units_run_while_there_is_time(tmp_path):
    proofs = {"costly": 110.0, "too_costly": 130.0} | {f"p{i}": 20.0 for i in range(40)}
    some = [ran(proofs, tmp_path, 4, seed, changed=("costly",)) for seed in range(3)]
    assert all("costly" in took and "too_costly" not in took for took in some)
    later = [ran(proofs, tmp_path, 4, seed, changed=[f"p{i}" for i in range(8)]) for seed in range(3)]
    assert not any("costly" in took for took in later)


def test_workers_share_the_budget(tmp_path):
    one, other = Budget(tmp_path / "ledger", 100.0), Budget(tmp_path / "ledger", 100.0)
    assert one.start("a", 60.0)
    assert not other.start("b", 60.0)
    assert other.start("c", 40.0)
    one.finish("a", 60.0, 20.0)
    assert other.start("b", 40.0)
    assert not other.start("d", 1.0)
    assert [line["proof"] for line in one.finished()] == ["a"]


def test_two_workers_have_two_minutes(tmp_path, monkeypatch):
    monkeypatch.setenv(sampling._LEDGER, str(tmp_path))
    monkeypatch.setenv("JAXLLM_SAMPLE_MINUTES", "")
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "2")
    assert Budget.here().seconds == 120.0


def test_a_sample_has_so_many_units_and_stops_at_a_failure(tmp_path):
    def run(proof, seed, index, examples):
        return Unit(proof.name, index, 1, {}, 6.0, failure="it fails" if index == failing else None)

    failing = None
    assert len(sampling.sample(make("a", sample=3), 1, Budget(tmp_path / "a", 60.0), 10.0, run)) == 3
    assert len(sampling.sample(make("a", sample=3), 1, Budget(tmp_path / "b", 10.5), 10.0, run)) == 1
    failing = 1
    assert len(sampling.sample(make("a", sample=3), 1, Budget(tmp_path / "c", 60.0), 10.0, run)) == 2


def test_a_unit_that_raises_gives_its_time_back(tmp_path):
    def run(*arguments, **options):
        raise KeyboardInterrupt

    budget = Budget(tmp_path / "a", 60.0)
    with pytest.raises(KeyboardInterrupt):
        sampling.sample(make("a"), 1, budget, 60.0, run)
    assert budget.start("b", 59.0)


def test_expected_seconds():
    record = {"seconds": 200.0, "run": 100}
    assert sampling.expected(make("a"), None, {}) == sampling.UNKNOWN
    assert sampling.expected(make("a"), record, {}) == pytest.approx(5.0)
    assert sampling.expected(make("a"), record | {"longest": 9.0}, {}) == pytest.approx(11.0)
    assert sampling.expected(make("a", 4, st.booleans()), record, {}) == pytest.approx(14.0)
    assert sampling.expected(make("a"), record, {"toy/a": {"at": 1.0, "seconds": 7.0}}) == 7.0


def test_the_log_has_what_a_run_sampled(tmp_path, monkeypatch):
    monkeypatch.setattr(sampling, "log_path", lambda: tmp_path / "log" / "sampled.json")
    monkeypatch.setenv(sampling._LEDGER, "")
    monkeypatch.setenv("JAXLLM_SAMPLE_MINUTES", "")
    for times in ([3.0, 1.0], [2.0]):
        folder = tmp_path / str(len(times))
        folder.mkdir()
        sampling.begin(folder, None, repeated=False)
        budget = Budget.here()
        for took in times:
            budget.start("toy/a", 5.0)
            budget.finish("toy/a", 5.0, took)
        sampling.end()
    entry = sampling._read(sampling.log_path())["toy/a"]
    assert entry["seconds"] == 2.0
    assert entry["at"] > 0
    (tmp_path / "again").mkdir()
    sampling.begin(tmp_path / "again", 2.5, repeated=True)
    assert sampling._read(tmp_path / "again" / "log.json")["toy/a"] == {"at": 0.0, "seconds": 2.0}
    assert sampling.minutes() == 2.5


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize(("samples", "others"), [(7, 50), (30, 4), (0, 5), (5, 0), (1, 1)])
def test_each_worker_begins_with_its_share_of_samples(workers, samples, others):
    class Item:
        def __init__(self, number, name):
            self.number, self.path = number, conftest.Path(name)

    items = [Item(i, "test_a.py") for i in range(others)]
    items[others // 2 : others // 2] = [Item(i, "test_sample.py") for i in range(samples)]
    dealt = conftest.samples_first(items, workers)
    assert sorted(map(id, dealt)) == sorted(map(id, items))
    assert [item.number for item in dealt if item.path.name == "test_a.py"] == list(range(others))
    if others >= samples and len(items) >= workers:
        size = len(items) // workers  # of each worker's piece, as xdist cuts the list
        pieces = [dealt[w * size :][:size] for w in range(workers)]
        for worker, piece in enumerate(pieces):
            own = list(range(samples))[worker::workers]
            assert [item.number for item in piece[: len(own)]] == own
            assert all(item.path.name == "test_a.py" for item in piece[len(own) :])


def test_a_proof_of_which_only_quick_cases_are_sampled_is_not_expected_to_take_as_long_as_its_record():
    made = Proof("toy", "p", lambda _: None, 3, 1, {}, None, 20, False, True, ("a", "b", "c"), quick=(1,))
    record = {"seconds": 3000.0, "run": 3, "longest": 2000.0}
    assert sampling.expected(made, record, {}) == sampling.UNKNOWN
    assert sampling.expected(made, record, {"toy/p": {"seconds": 31.0}}) == 31.0
