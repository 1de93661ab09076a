"""Preparation of a corpus: plans its tasks, has them run, and writes manifest and report."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxllm.config import digest, to_dict
from jaxllm.data.prepare.corpus_config import CorpusConfig
from jaxllm.data.prepare.corpus_manifest import FORMAT, read_manifest
from jaxllm.data.prepare.corpus_report import corpus_report
from jaxllm.data.prepare.corpus_rows import corpus_format
from jaxllm.data.prepare.document_rules import DocumentRules
from jaxllm.data.prepare.executors import StageProgress, run_stages
from jaxllm.data.prepare.object_cache import list_files
from jaxllm.data.prepare.rule_counts import RuleCounts, load_counts
from jaxllm.data.prepare.stages import (
    Corpus,
    InputFile,
    evaluation_items,
    open_corpus_tokenizer,
    write_plan,
)
from jaxllm.data.quality.near_duplicates import BandKeys
from jaxllm.data.token_files import sidecar
from jaxllm.files import DataError, atomic, read_json, write_json

LIBRARIES = {"language": "py3langid", "quality": "datatrove", "pii": "datatrove", "dedup": "rensa"}
"""Package whose version decides what a table of the settings does."""


@dataclass(frozen=True)
class PreparedCorpus:
    """Prepared corpus: the path of its manifest, and its manifest."""

    path: Path
    manifest: dict[str, Any]


def work_folder(config: CorpusConfig) -> Path:
    """Folder of unfinished work, inside the output folder."""
    return Path(config.out) / ".work"


def prepare_corpus(
    config: CorpusConfig, *, on: str = "local", workers: int = 1, progress: StageProgress | None = None
) -> PreparedCorpus:
    """Prepares a corpus, or resumes; returns at once if it is finished.

    Args:
        on: "local", "ray", or "ray://HOST:PORT".
        workers: processes, or tasks at a time.
        progress: called with (stage, tasks done, tasks).

    Raises DataError naming the file for input that cannot be used, or a folder that was begun with other settings.
    """
    if (found := finished(config)) is None:
        work = plan_corpus(config)
        run_stages(work, on, workers, progress or (lambda stage, done, total: None))
        found = finish_corpus(work)
    return found


def settings_hash(config: CorpusConfig) -> str:
    """Hash of the settings that determine the corpus: all but its folder."""
    return digest(dataclasses.replace(config, out=""))


def finished(config: CorpusConfig) -> PreparedCorpus | None:
    """Corpus that these settings gave before; None if there is none.

    Raises DataError if the folder holds a corpus of other settings or inputs.
    """
    path = Path(config.out) / "manifest.json"
    if not path.is_file():
        return None
    manifest = read_manifest(path, Path(config.out))
    if manifest["settings_hash"] != settings_hash(config):
        raise DataError(f"{path}: a corpus of other settings; choose another `out`, or delete that folder")
    before = [(one["file"], one["bytes"]) for source in manifest["sources"] for one in source["files"]]
    now = [(one.name, one.size) for one in input_files(config)]
    if changed := [name for name, _ in set(before) ^ set(now)]:
        raise DataError(f"{path}: made from other files ({changed[0]} differs); choose another `out`, or delete it")
    shutil.rmtree(work_folder(config), ignore_errors=True)  # a kill may have left a part of it
    return PreparedCorpus(path, manifest)


def input_files(config: CorpusConfig) -> list[InputFile]:
    """Input files of all sources, in order. Raises DataError for a pattern that matches nothing, or a file twice."""
    found: dict[str, InputFile] = {}
    for index, source in enumerate(config.source):
        for one in list_files(source.files, f"source {source.name!r}"):
            if one.name in found:
                other = config.source[found[one.name].source].name
                raise DataError(f"{one.name}: is in source {source.name!r} and in {other!r}; name it in one of them")
            kind = corpus_format(one.name, source)
            found[one.name] = InputFile(index, one.name, one.size, one.version, kind)
    return list(found.values())


def plan_corpus(config: CorpusConfig) -> Path:
    """Lists the input files, checks the settings, and writes the plan; returns the work folder.

    Raises DataError or ConfigError naming the setting or file that cannot be used, before any work is done.
    """
    files = input_files(config)
    DocumentRules(config)
    if config.dedup and config.dedup.threshold:
        BandKeys(config.dedup.threshold, config.dedup.hashes, config.dedup.ngram_words)
    rule = config.decontamination
    evals = [vars(one) for one in list_files(rule.evals, "decontamination.evals")] if rule else []
    if rule:
        next(evaluation_items(rule.evals, rule.text_field, work_folder(config) / "objects"))
    tokenizer = open_corpus_tokenizer(config).fingerprint
    libraries = {name: importlib.metadata.version(name) for name in used_libraries(config)}
    lists = [vars(one) for one in list_files(config.blocklist.files, "blocklist.files")] if config.blocklist else []
    work = work_folder(config)
    inputs = {"tokenizer": tokenizer, "evaluations": evals, "blocklist": lists}
    write_plan(config, files, work, inputs | libraries)
    return work


def used_libraries(config: CorpusConfig) -> list[str]:
    """Packages whose versions decide the output."""
    return sorted({package for table, package in LIBRARIES.items() if getattr(config, table)})


def finish_corpus(work: Path) -> PreparedCorpus:
    """Writes manifests, tokenizer and report, and deletes the work folder.

    Raises DataError naming the stage if tasks are not done.
    """
    corpus = Corpus(work)
    corpus.require("finish")
    plan = read_json(work / "plan.json")
    out, config = corpus.out, corpus.config
    counts: dict[str, RuleCounts] = {}
    sources = []
    shards = [_described(out, shard) for shard in corpus.shards]
    for index, source in enumerate(config.source):
        total, files = counts.setdefault(source.name, RuleCounts()), []
        for number, file in enumerate(corpus.files):
            if file.source != index:
                continue
            first, more = load_counts(corpus.path("filter", number) / "counts.json")
            last, _ = load_counts(corpus.path("tokens", number) / "counts.json")
            first.kept = 0  # those that the next stages kept count
            first.add(last)
            total.add(first)
            files.append({"file": file.name, "bytes": file.size, "sha256": more["sha256"], "rows": more["last_row"],
                          "read": first.read, "kept": first.kept})  # fmt: skip
        sources.append({
            "name": source.name,
            "license": source.license,
            "about": source.about,
            "read": total.read,
            "kept": total.kept,
            "tokens": total.tokens,
            "characters": total.characters,
            "dropped": dict(sorted(total.dropped.items())),
            "masked": dict(sorted(total.masked.items())),
            "empty_files": [one["file"] for one in files if not one["bytes"]],
            "files": files,
        })  # fmt: skip
    corpus.tokenizer.save(out / "tokenizer")
    libraries = {k: v for k, v in plan["libraries"].items() if k not in ("tokenizer", "evaluations", "blocklist")}
    common = {
        "format": FORMAT,
        "version": 1,
        "tokenizer": {"fingerprint": corpus.tokenizer.fingerprint, "vocab_size": corpus.tokenizer.vocab_size},
        "settings_hash": settings_hash(config),
        "settings": {k: v for k, v in to_dict(config).items() if k not in ("out", "source", "tokenizer")},
        "libraries": libraries,
    }
    for one in sources:
        own = [shard for shard in shards if shard["source"] == one["name"]]
        inner = [shard | {"file": shard["file"].partition("/")[2]} for shard in own]
        write_json(out / one["name"] / "manifest.json", common | {"sources": [one], "shards": inner})
    manifest = common | {"sources": sources, "shards": shards}
    with atomic(out / "report.html") as file:
        file.write(corpus_report(manifest, counts).encode())
    for left in out.rglob(".*.tmp"):  # of tasks that were killed
        if work not in left.parents:
            left.unlink(missing_ok=True)
    write_json(out / "manifest.json", manifest)
    shutil.rmtree(work)
    return PreparedCorpus(out / "manifest.json", manifest)


def _described(out: Path, shard: dict[str, Any]) -> dict[str, Any]:
    path = out / shard["file"]
    about = read_json(sidecar(path))
    named = {name: about[name] for name in ("dtype", "tokens", "documents", "sha256")}
    return {"source": shard["source"], "file": shard["file"], "bytes": path.stat().st_size, **named}
