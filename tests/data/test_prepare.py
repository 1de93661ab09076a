"""Preparing a corpus: settings, rows that cannot be used, order, resuming, refusals, executors, manifest, command."""

from __future__ import annotations

import dataclasses
import gzip
import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from jaxllm.cli import main
from jaxllm.config import ConfigError
from jaxllm.data import DataConfig, DataError, load_dataset
from jaxllm.data.prepare import corpus_rows, executors
from jaxllm.data.prepare.corpus_config import read_corpus_config
from jaxllm.data.prepare.executors import check_executor, run_part, run_stages, write_slurm
from jaxllm.data.prepare.preparation import finish_corpus, plan_corpus, prepare_corpus, work_folder
from jaxllm.data.prepare.stages import STAGES, Corpus
from jaxllm.data.token_files import open_tokens
from jaxllm.text import ByteTokenizer

pytest.importorskip("pyarrow")
pytest.importorskip("rensa")

WORDS = ["amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heath", "islet", "jetty", "knoll", "larch"]


def story(rng, sentences: int = 8) -> str:
    return " ".join(" ".join(rng.choice(WORDS, 9)).capitalize() + "." for _ in range(sentences))


def write_jsonl(path: Path, texts: list) -> Path:
    path.write_text("".join((text if isinstance(text, str) and text.startswith("RAW") else json.dumps({"text": text}))
                            .removeprefix("RAW") + "\n" for text in texts))  # fmt: skip
    return path


def settings(tmp_path: Path, more: str = "", *, out: str = "out", files: str = '"a.jsonl", "b.jsonl"') -> Path:
    path = tmp_path / f"{out}.toml"
    path.write_text(
        f'out = "{out}"\ntokenizer = "byte"\nshard_tokens = 2000\n{more}\n'
        f'[[source]]\nname = "web"\nfiles = [{files}]\nlicense = "CC0"\nabout = "drawn"\n'
    )
    return path


def prepared(path: Path, **kwargs):
    return prepare_corpus(read_corpus_config(path), **kwargs)


def texts(folder: Path) -> list[str]:
    tokenizer = ByteTokenizer()
    manifest = json.loads((folder / "manifest.json").read_text())
    found = [one for shard in manifest["shards"] for one in open_tokens(folder / shard["file"], tokenizer)]
    return [tokenizer.decode([int(token) for token in one[1:-1]]) for one in found]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def stories(tmp_path, rng) -> list[str]:
    """Twenty texts in a.jsonl and twenty in b.jsonl, of which number 3 is equal to a's, and 5 nearly."""
    made = [story(rng) for _ in range(40)]
    made[23] = made[3].replace(" ", "  ")
    made[25] = made[5].replace(made[5].split()[30], "elsewhere", 1)
    write_jsonl(tmp_path / "a.jsonl", made[:20])
    write_jsonl(tmp_path / "b.jsonl", made[20:])
    return made


def test_documents_are_kept_in_the_order_of_files_and_rows(tmp_path, stories):
    corpus = prepared(settings(tmp_path, "[dedup]"))
    assert texts(tmp_path / "out") == [text for number, text in enumerate(stories) if number not in (23, 25)]
    (source,) = corpus.manifest["sources"]
    assert source["dropped"] == {"duplicate": 1, "near_duplicate": 1}
    assert (source["read"], source["kept"], source["license"], source["about"]) == (40, 38, "CC0", "drawn")
    assert [one["kept"] for one in source["files"]] == [20, 18]
    assert source["tokens"] == sum(shard["tokens"] for shard in corpus.manifest["shards"])
    assert all(2000 <= shard["tokens"] < 3500 for shard in corpus.manifest["shards"][:-1])
    assert not (tmp_path / "out" / ".work").exists()
    report = (tmp_path / "out" / "report.html").read_text()
    assert f"of {tmp_path}/a.jsonl:4" in report
    assert "elsewhere" in report


def test_without_tables_everything_is_kept(tmp_path, stories):
    corpus = prepared(settings(tmp_path))
    assert texts(tmp_path / "out") == stories
    assert corpus.manifest["libraries"] == {}


def test_a_folder_that_was_deleted_is_another_corpus(tmp_path, stories):
    path = settings(tmp_path)
    prepared(path)
    shutil.rmtree(tmp_path / "out")
    corpus = prepared(settings(tmp_path, "[dedup]"))
    assert corpus.manifest["sources"][0]["kept"] == 38


def test_exact_duplicates_only(tmp_path, stories):
    corpus = prepared(settings(tmp_path, "[dedup]\nthreshold = 0"))
    assert corpus.manifest["sources"][0]["dropped"] == {"duplicate": 1}


def test_rows_that_cannot_be_used_are_counted_by_rule(tmp_path, rng, monkeypatch):
    monkeypatch.setattr(corpus_rows, "MOST_LINE_BYTES", 3000)
    good = [story(rng) for _ in range(3)]
    bad = ["RAW{", "RAW[1]", 'RAW{"text": 3}', 'RAW{"txt": "a"}', "RAW", "  ", "RAW{\"text\": \"\\ud800\"}", "x" * 2000,
           "y" * 5000, 'RAW{"text": null}']  # fmt: skip
    path = write_jsonl(tmp_path / "a.jsonl", [good[0], *bad, good[1]])
    with path.open("ab") as file:
        file.write(b'{"text": "latin \xe9"}\n' + json.dumps({"text": good[2]}).encode())  # the last line has no end
    (tmp_path / "b.jsonl").write_bytes(b"")
    corpus = prepared(settings(tmp_path, "max_characters = 1500"))
    (source,) = corpus.manifest["sources"]
    assert texts(tmp_path / "out") == good
    assert source["dropped"] == {"no_text": 4, "too_long": 2, "unreadable": 5}
    assert source["read"] == 14 == source["kept"] + sum(source["dropped"].values())
    assert source["empty_files"] == [str(tmp_path / "b.jsonl")]
    report = (tmp_path / "out" / "report.html").read_text()
    assert "not valid JSON" in report
    assert "not UTF-8 (byte 0xe9)" in report


def test_formats_of_files(tmp_path, rng):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    made = [story(rng, 2) for _ in range(7)]
    parquet.write_table(arrow.table({"text": made[:2]}), tmp_path / "a.parquet")
    (tmp_path / "b.txt").write_text(f"{made[2]}\n<|endoftext|>\n{made[3]}")
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as file:
        file.write(json.dumps({"text": made[4]}))
    archive = [(b"conversion", b"text/plain", made[5]), (b"conversion", b"text/html", "<p>x</p>"),
               (b"request", b"text/plain", "GET /"), (b"conversion", b"text/plain", made[6])]  # fmt: skip
    (tmp_path / "d.wet").write_bytes(b"".join(
        b"WARC/1.0\r\nWARC-Type: %s\r\nWARC-Target-URI: http://a.b/\r\nContent-Type: %s\r\n"
        b"Content-Length: %d\r\n\r\n%s\r\n\r\n"
        % (kind, mime, len(text.encode()), text.encode()) for kind, mime, text in archive))  # fmt: skip
    pytest.importorskip("warcio")
    corpus = prepared(settings(tmp_path, files='"a.parquet", "b.txt", "c.jsonl.gz", "d.wet"'))
    assert [one.strip() for one in texts(tmp_path / "out")] == made
    assert corpus.manifest["sources"][0]["dropped"] == {"not_plain_text": 1}


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.parquet", "a.wet"])
def test_a_truncated_file_is_refused_by_name_and_nothing_is_written(tmp_path, rng, name):
    if name == "a.parquet":
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.table({"text": [story(rng)] * 99}), tmp_path / name)
    elif name == "a.wet":
        pytest.importorskip("warcio")
        (tmp_path / name).write_bytes(b"WARC/1.0\r\nWARC-Type: conversion\r\nContent-Length: 900\r\n\r\n" + b"x" * 800)
    else:
        (tmp_path / name).write_bytes(gzip.compress(json.dumps({"text": story(rng)}).encode()))
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=name):
        prepared(settings(tmp_path, files=f'"{name}"'))
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_decontamination_finds_planted_ngrams_and_nothing_else(tmp_path, rng):
    vocabulary = [f"w{number}" for number in range(3000)]
    items = [" ".join(rng.choice(vocabulary, 30)) for _ in range(20)] + ["too short", "five words are searched for"]
    made = [" ".join(rng.choice(vocabulary, 120)) for _ in range(60)]
    planted = {7: items[3].split()[5:18], 21: items[4].split()[-13:], 40: items[21].split()}
    almost = {11: items[5].split()[5:17], 33: items[20].split()}  # twelve words; too short to be searched for
    for number, words in (planted | almost).items():
        made[number] = " ".join([*made[number].split()[:50], *words, *made[number].split()[50:]]).upper()
    write_jsonl(tmp_path / "a.jsonl", made)
    write_jsonl(tmp_path / "evals.jsonl", items)
    corpus = prepared(settings(tmp_path, '[decontamination]\nevals = ["evals.jsonl"]', files='"a.jsonl"'))
    assert corpus.manifest["sources"][0]["dropped"] == {"contaminated": len(planted)}
    assert texts(tmp_path / "out") == [text for number, text in enumerate(made) if number not in planted]
    assert "item 5 of the evaluations" in (tmp_path / "out" / "report.html").read_text()


def test_parts_in_any_order_and_again_give_the_same_bytes(tmp_path, stories, rng):
    whole, parts = settings(tmp_path, "[dedup]"), settings(tmp_path, "[dedup]", out="parts")
    prepared(whole)
    work = plan_corpus(read_corpus_config(parts))
    with pytest.raises(
        DataError, match="stage near needs stage filter, of which 2 tasks are not done, task 0 among them"
    ):
        run_part(work, "near:0/3")
    with pytest.raises(DataError, match="stage finish needs stage filter"):
        finish_corpus(work)
    for stage in STAGES:
        for number in [*rng.permutation(3), 0]:
            run_part(work, f"{stage}:{number}/3")
    finish_corpus(work)
    assert contents(tmp_path / "out") == contents(tmp_path / "parts")
    with pytest.raises(ValueError, match="legal: STAGE:I/N with I below N"):
        run_part(work, "filter:3/3")


def test_a_stopped_run_resumes_with_the_tasks_that_are_not_done(tmp_path, stories, monkeypatch):
    path = settings(tmp_path, "[dedup]")
    prepared(settings(tmp_path, "[dedup]", out="other"))
    ran = []

    class Killed(BaseException):
        pass

    def run(self, stage, number, done=Corpus.run):
        if (stage, number) == ("tokens", 1) and len(ran) < 100:
            raise Killed
        ran.append((stage, number))
        done(self, stage, number)

    monkeypatch.setattr(Corpus, "run", run)
    with pytest.raises(Killed):
        prepared(path)
    before = list(ran)
    ran += [("", 0)] * 100
    prepared(path)
    assert not set(ran[len(before) + 100 :]) & set(before)
    assert contents(tmp_path / "out") == contents(tmp_path / "other")
    ran.clear()
    prepared(path)
    assert not ran, "a finished corpus is not made again"


def test_a_folder_of_other_settings_or_inputs_is_refused(tmp_path, stories):
    path = settings(tmp_path, "[dedup]")
    config = read_corpus_config(path)
    plan_corpus(config)
    settings(tmp_path, "[dedup]\nthreshold = 0.7")
    with pytest.raises(DataError, match=r"other config \(dedup.threshold: 0.8 before, 0.7 now\)"):
        plan_corpus(read_corpus_config(path))
    (tmp_path / "b.jsonl").write_text('{"text": "other"}\n')
    with pytest.raises(DataError, match=r"other files \(\[1\]\.\w+"):
        plan_corpus(config)
    work = work_folder(config)
    (work / "plan.json").unlink()
    prepare_corpus(config)
    with pytest.raises(DataError, match="a corpus of other settings"):
        prepared(path)
    (tmp_path / "b.jsonl").write_text('{"text": "another"}\n')
    with pytest.raises(DataError, match=r"made from other files \(.*b.jsonl differs\)"):
        prepare_corpus(config)


def test_a_full_disk_is_named_and_nothing_is_lost(tmp_path, stories, monkeypatch):
    path = settings(tmp_path, "[dedup]")
    prepared(settings(tmp_path, "[dedup]", out="other"))

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("jaxllm.data.prepare.stages.write_documents", full)
        with pytest.raises(
            DataError, match=r"stage filter, task 0 \(.*a.jsonl\): No space left on device. What is done"
        ):
            prepared(path)
    assert not list((tmp_path / "out/.work/filter").glob("*"))
    prepared(path)
    assert contents(tmp_path / "out") == contents(tmp_path / "other")


HEAD, SOURCE = 'out = "o"\ntokenizer = "byte"\n', '[[source]]\nname = "a"\nfiles = ["x"]\nlicense = ""\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tokenizer = ", "not valid TOML"),
        (f"{HEAD}source = []", "there is no"),
        (f"{HEAD}{SOURCE}{SOURCE}", "two sources are called 'a'"),
        (f"{HEAD}[dedup]\ntreshold = 1\n{SOURCE}", "treshold"),
        (f"{HEAD}[dedup]\nthreshold = 2.0\n{SOURCE}", "dedup.threshold is 2.0; legal"),
        (f'{HEAD}[quality]\nrules = ["c5"]\n{SOURCE}', "'c5'; legal"),
        (f'out = "s3://b/o"\ntokenizer = "byte"\n{SOURCE}', "must be a folder"),
        (f'out = "o"\ntokenizer = "bpe:300"\n{SOURCE}', "tokenizer is 'bpe:300'; legal"),
        (HEAD + SOURCE.replace('"a"', '"a/b"'), "a name has letters"),
    ],
)
def test_settings_that_are_wrong_are_named(tmp_path, text, message):
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_corpus_config(tmp_path / "c.toml")


def test_inputs_that_are_wrong_are_named_before_any_work(tmp_path, stories):
    with pytest.raises(DataError, match=r"source 'web': .*none.jsonl matches no file"):
        prepared(settings(tmp_path, files='"none.jsonl"'))
    with pytest.raises(DataError, match="is listed twice"):
        prepared(settings(tmp_path, files='"a.jsonl", "*.jsonl"'))
    second = '[[source]]\nname = "books"\nfiles = ["a.jsonl"]\nlicense = "MIT"\n'
    with pytest.raises(DataError, match=r"a.jsonl: is in source 'web' and in 'books'"):
        prepared(settings(tmp_path, second))
    (tmp_path / "c.docx").touch()
    with pytest.raises(DataError, match=r"c.docx: the suffix names no known format; legal: .txt"):
        prepared(settings(tmp_path, files='"c.docx"'))
    assert not (tmp_path / "out").exists()


def test_two_sources_have_shards_of_their_own(tmp_path, stories):
    second = '[[source]]\nname = "books"\nfiles = ["b.jsonl"]\nlicense = "MIT"\n[dedup]'
    corpus = prepared(settings(tmp_path, second, files='"a.jsonl"'))
    assert [one["source"] for one in corpus.manifest["shards"]] == sorted(
        one["source"] for one in corpus.manifest["shards"]
    )
    assert [one["name"] for one in corpus.manifest["sources"]] == ["books", "web"]
    assert texts(tmp_path / "out/books") + texts(tmp_path / "out/web") == texts(tmp_path / "out")
    assert len(texts(tmp_path / "out/books")) == 20, "the first source keeps its documents"


def test_two_sources_with_equal_ids_lose_nothing(tmp_path, rng):
    made = [story(rng, 3) for _ in range(6)]
    for name, some in (("a", made[:3]), ("b", made[3:])):
        rows = [json.dumps({"id": number, "text": text}) for number, text in enumerate(some)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    second = '[[source]]\nname = "books"\nfiles = ["a.jsonl"]\nlicense = "MIT"\n[dedup]'
    prepared(settings(tmp_path, second, files='"b.jsonl"'))
    assert texts(tmp_path / "out") == made


def test_training_reads_shards_with_exact_cursors(tmp_path, stories):
    prepared(settings(tmp_path))
    tokenizer = str(tmp_path / "out/tokenizer")
    config = DataConfig(str(tmp_path / "out/manifest.json"), tokenizer=tokenizer, seq_len=48, batch_size=8,
                        heldout_fraction=0.0)  # fmt: skip
    one = settings(tmp_path, out="one")
    one.write_text(one.read_text().replace("shard_tokens = 2000", ""))
    single = prepared(one).manifest["shards"]
    assert len(single) == 1
    whole = load_dataset(config).train
    plain = load_dataset(dataclasses.replace(config, source=str(tmp_path / "one" / single[0]["file"]))).train
    for step in (0, 1, 30, 200):
        for array, expected in zip(whole.batch_at(step).arrays, plain.batch_at(step).arrays, strict=True):
            assert np.array_equal(array, expected)
        halves = [whole.batch_at(step, shard=shard, num_shards=2).tokens for shard in (0, 1)]
        assert np.array_equal(np.concatenate(halves), whole.batch_at(step).tokens)
    assert load_dataset(config).train.check_cursor(whole.cursor(7)) == 7
    held = load_dataset(DataConfig(config.source, tokenizer=tokenizer, seq_len=48, batch_size=8, packing="documents"))
    assert held.heldout is not None
    assert len(list(held.heldout))


def test_a_damaged_shard_is_named(tmp_path, stories):
    corpus = prepared(settings(tmp_path))
    config = DataConfig(str(corpus.path), tokenizer="byte", seq_len=48, batch_size=4, heldout_fraction=0.0)
    second = tmp_path / "out" / corpus.manifest["shards"][1]["file"]
    raw = bytearray(second.read_bytes())
    raw[100] ^= 1
    second.write_bytes(raw)
    data = load_dataset(config).train
    with pytest.raises(DataError, match=r"00001.bin: does not match the sha256 in the manifest"):
        [data.batch_at(step) for step in range(40)]
    second.write_bytes(raw[:-1])
    with pytest.raises(DataError, match=r"00001.bin: missing or truncated"):
        load_dataset(config)
    corpus.path.write_text('{"format": "other"}')
    with pytest.raises(DataError, match="not the manifest of a corpus"):
        load_dataset(config)


def test_slurm_scripts_submit_the_stages_in_order(tmp_path, stories):
    path = settings(tmp_path, "[dedup]")
    work = plan_corpus(read_corpus_config(path))
    script = write_slurm(work, path, 3)
    listed = [line.split()[-1] for line in script.read_text().splitlines() if "sbatch " in line]
    assert [Path(one.strip(")")).stem for one in listed] == [*STAGES, "finish"]
    assert "--array=0-2" in (script.parent / "near.sbatch").read_text()
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin/sbatch"  # a scheduler that runs each job at once
    fake.write_text('#!/bin/bash\necho "$*" >> "$LOG"\nwc -l < "$LOG"\n')
    fake.chmod(0o755)
    log = tmp_path / "log"
    env = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "LOG": str(log)}
    subprocess.run([str(script), "--partition=cpu"], check=True, env=env, capture_output=True)
    calls = log.read_text().splitlines()
    assert calls[0].startswith("--parsable --partition=cpu /")
    assert "--dependency=afterok:6" in calls[6]
    assert calls[6].endswith("finish.sbatch")


def test_executors_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match=r"--on slrum: no such executor. Did you mean 'slurm'\?"):
        check_executor("slrum", 1)
    with pytest.raises(ValueError, match="--workers 0: it must be 1 or more"):
        check_executor("local", 0)


def test_lost_workers_are_replaced(tmp_path, stories, monkeypatch):
    """A pool whose processes die once: its tasks are given to a new one; one that always dies is given up."""
    from concurrent.futures import Future
    from concurrent.futures.process import BrokenProcessPool

    work = plan_corpus(read_corpus_config(settings(tmp_path)))
    pools = []

    class Pool:
        def __init__(self, workers, context):
            self.dies = len(pools) in dying
            pools.append(self)

        def submit(self, function, *arguments):
            one = Future()
            if self.dies:
                one.set_exception(BrokenProcessPool("lost"))
            else:
                one.set_result(function(*arguments))
            return one

        def shutdown(self, cancel_futures):
            pass

    monkeypatch.setattr(executors, "ProcessPoolExecutor", Pool)
    dying = {0}
    run_stages(work, "local", 2, lambda *_: None)
    assert len(pools) == 2
    finish_corpus(work)
    assert texts(tmp_path / "out") == stories
    pools.clear()
    dying = {0, 1, 2}
    work = plan_corpus(read_corpus_config(settings(tmp_path, out="other")))
    with pytest.raises(DataError, match="stage filter: workers were lost 3 times without finishing one of tasks 0, 1"):
        run_stages(work, "local", 2, lambda *_: None)


def test_the_command_prints_what_was_dropped(tmp_path, stories, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = settings(tmp_path, "[dedup]")
    assert main(["data", "prepare", str(path)]) == 0
    out = capsys.readouterr().out
    assert "web: 38 of 40 documents (95.0%)" in out
    assert "near_duplicate" in out
    assert "out/manifest.json: " in out
    other = settings(tmp_path, "[dedup]", out="slurm")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert main(["data", "prepare", str(other), "--on", "slurm", "--workers", "2"]) == 0
    assert "submit.sh" in capsys.readouterr().out
    for stage in STAGES:
        assert main(["data", "prepare", str(other), "--part", f"{stage}:0/1"]) == 0
    assert main(["data", "prepare", str(other), "--part", "finish"]) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "slurm")


def test_texts_without_words_are_deduplicated_as_they_are(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["!!!", "?", "!!!"])
    found = prepared(settings(tmp_path, "[dedup]", files='"a.jsonl"'))
    assert texts(found.path.parent) == ["!!!", "?"]


def test_another_blocklist_is_refused_in_a_folder_that_was_begun(tmp_path, stories):
    (tmp_path / "list.txt").write_text(stories[2].split()[4] + "\n")
    path = settings(tmp_path, '[blocklist]\nfiles = ["list.txt"]')
    plan_corpus(read_corpus_config(path))
    (tmp_path / "list.txt").write_text("other words\n")
    with pytest.raises(DataError, match="blocklist"):
        prepared(path)


def test_evaluations_without_items_are_named_before_any_work(tmp_path, stories, capsys):
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "other.jsonl").write_text("")
    path = settings(tmp_path, '[decontamination]\nevals = ["empty.jsonl", "other.jsonl"]')
    assert main(["data", "prepare", str(path)]) == 2
    assert "error: decontamination.evals: there are no items in" in capsys.readouterr().err
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert not list((tmp_path / "out").glob(".work/filter/*"))
    (tmp_path / "other.jsonl").write_text('{"text": "one two three four five six"}\n')
    assert main(["data", "prepare", str(path)]) == 0
