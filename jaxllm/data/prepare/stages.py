"""Stages of preparing a corpus: each is a number of tasks that can run anywhere, in any order, any number of times.

| stage | a task | writes |
|---|---|---|
| filter | an input file | its documents after the rules, with keys for deduplication |
| exact | an interval of hashes | documents with the words of an earlier one |
| candidates | an interval of band keys | pairs of documents to compare |
| near | an input file | its documents that are similar to an earlier one |
| tokens | an input file | tokens of its documents, without duplicates and contaminated ones |
| shards | an output shard | a token file |

A task writes one folder or file, which appears only when it is whole: a task is done if that exists. So a killed run
resumes by running the tasks that are not done, and the output does not depend on who ran them. Its order is that of
sources in the settings, files in a source, and rows in a file.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jaxllm.config import from_dict, to_dict
from jaxllm.data.prepare.corpus_config import CorpusConfig, CorpusSource
from jaxllm.data.prepare.corpus_rows import corpus_format, read_rows_of
from jaxllm.data.prepare.document_rules import DocumentRules
from jaxllm.data.prepare.document_store import BATCH, DocumentStore, write_documents
from jaxllm.data.prepare.object_cache import StoredFile, list_files, local_copy
from jaxllm.data.prepare.rule_counts import RuleCounts, load_counts, save_counts
from jaxllm.data.quality import near_duplicates
from jaxllm.data.quality.contamination import EvaluationIndex
from jaxllm.data.quality.near_duplicates import BAND, EXACT, PAIR, BandKeys, SortedWriter, document_id, save_sorted
from jaxllm.data.quality.word_shingles import words
from jaxllm.data.sources.remote_files import content_sha256
from jaxllm.data.token_files import sidecar, write_tokens
from jaxllm.files import DataError, at, new_directory, read_json, write_json
from jaxllm.text import ByteTokenizer, Tokenizer, load_tokenizer

ENCODE_CHARACTERS = 1 << 20
"""Characters that are tokenised at a time."""
HELD = 64
"""Files, and batches of documents, that a lookup of texts holds."""
STAGES = ("filter", "exact", "candidates", "near", "tokens", "shards")


Key, Value = TypeVar("Key"), TypeVar("Value")


@dataclass(frozen=True)
class InputFile:
    """Input file: the index of its source, and what the listing said of it."""

    source: int
    name: str
    size: int
    version: str
    kind: str

    @property
    def stored(self) -> StoredFile:
        """File as it is stored."""
        return StoredFile(self.name, self.size, self.version)


class Corpus:
    """Corpus being prepared: its settings, its input files, and the tasks of its stages, in a work folder.

    The folder's `plan.json` is all that a worker needs.
    """

    def __init__(self, work: Path):
        plan = read_json(work / "plan.json")
        self.work = work
        self.config = from_dict(CorpusConfig, plan["config"], str(work / "plan.json"))
        self.out = Path(plan["config"]["out"])
        self.files = [InputFile(**one) for one in plan["files"]]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the corpus."""
        return open_corpus_tokenizer(self.config)

    @cached_property
    def rules(self) -> DocumentRules:
        """Rules that look at one document."""
        return DocumentRules(self.config)

    @cached_property
    def band_keys(self) -> BandKeys | None:
        """LSH band keys; None if near duplicates are kept."""
        dedup = self.config.dedup
        return BandKeys(dedup.threshold, dedup.hashes, dedup.ngram_words) if dedup and dedup.threshold else None

    @cached_property
    def evaluation(self) -> EvaluationIndex | None:
        """N-grams of the evaluation sets; None without decontamination."""
        rule = self.config.decontamination
        if rule is None:
            return None
        items = evaluation_items(rule.evals, rule.text_field, self.work / "objects")
        return EvaluationIndex(items, rule.ngram_words)

    def source_of(self, number: int) -> CorpusSource:
        """Source of an input file."""
        return self.config.source[self.files[number].source]

    def path(self, stage: str, number: int) -> Path:
        """Path whose existence says that a task is done."""
        if stage == "shards":
            return sidecar(self.out / self.shards[number]["file"])
        named = f"{number:06}.npy" if stage in ("exact", "candidates", "near") else f"{number:06}"
        return self.work / stage / named

    def done(self, stage: str, number: int) -> bool:
        """Whether a task is done."""
        return self.path(stage, number).exists()

    def tasks(self, stage: str) -> int:
        """Number of tasks of a stage; those of earlier stages must be done."""
        dedup = self.config.dedup
        if stage == "exact":
            return near_duplicates.partition_count(self.documents) if dedup else 0
        if stage == "candidates":
            bands = self.band_keys.bands if self.band_keys else 0
            return near_duplicates.partition_count(self.documents * bands) if bands else 0
        if stage == "near":
            return len(self.files) if dedup and dedup.threshold else 0
        return len(self.shards) if stage == "shards" else len(self.files)

    @cached_property
    def documents(self) -> int:
        """Documents of all input files after the filter stage, which must be done."""
        path = self.work / "documents.json"
        if not path.exists():
            self.require("exact")
            kept = [
                load_counts(self.path("filter", number) / "counts.json")[0].kept for number in range(len(self.files))
            ]
            write_json(path, sum(kept))
        return read_json(path)

    def require(self, stage: str) -> None:
        """Raises DataError, naming the stage, unless all tasks of the stages before are done."""
        for before in STAGES[: STAGES.index(stage)] if stage in STAGES else STAGES:
            if pending := self.pending(before):
                raise DataError(f"{self.out}: stage {stage} needs stage {before}, of which {len(pending):,} tasks are "
                                f"not done, task {pending[0]} among them")  # fmt: skip

    def pending(self, stage: str) -> list[int]:
        """Tasks of a stage that are not done."""
        return [number for number in range(self.tasks(stage)) if not self.done(stage, number)]

    def run(self, stage: str, number: int) -> None:
        """Runs a task, or nothing if it is done.

        Raises DataError naming the input file for one that cannot be read, and the folder if the disk is full.
        """
        if self.done(stage, number):
            return
        try:
            TASKS[stage](self, number)
        except FileExistsError:
            pass  # another worker ran it meanwhile
        except OSError as error:
            if self.done(stage, number):
                return
            where = f"stage {stage}, task {number}" + (
                f" ({self.files[number].name})" if stage in ("filter", "near", "tokens") else ""
            )
            raise DataError(f"{self.out}: {where}: {error.strerror or error}. What is done is kept: make room, or "
                            "repair it, and run the command again to resume") from error  # fmt: skip

    def keys(self, name: str) -> list[Path]:
        """Sorted files of keys of all input files, in order."""
        return [self.path("filter", number) / f"{name}.npy" for number in range(len(self.files))]

    def results(self, stage: str) -> list[Path]:
        """Results of the tasks of a stage, in order."""
        return [self.path(stage, number) for number in range(self.tasks(stage))]

    @cached_property
    def shards(self) -> list[dict[str, Any]]:
        """Output shards: source, file, and (input file, first document, end, first token, end) of each piece."""
        path = self.work / "shards.json"
        if not path.exists():
            write_json(path, list(plan_shards(self)))
        return read_json(path)


def open_corpus_tokenizer(config: CorpusConfig) -> Tokenizer:
    """Tokenizer of a corpus. Raises DataError if it cannot be opened."""
    return ByteTokenizer() if config.tokenizer == "byte" else load_tokenizer(config.tokenizer)


def evaluation_items(evals: tuple[str, ...], text_field: str, cache: Path) -> Iterator[str]:
    """Items of evaluation sets, one at least.

    Raises DataError for a file that cannot be read, a row without an item, or files without any.
    """
    found = False
    for stored in list_files(evals, "decontamination.evals"):
        source = CorpusSource("evals", (stored.name,), "", text_field=text_field)
        kind = corpus_format(stored.name, source)
        for one in read_rows_of(local_copy(stored, cache), stored.name, kind, source, 1 << 62):
            if one.rule:
                raise DataError(f"decontamination.evals: {one.why}")
            found = True
            yield one.text
    if not found:
        raise DataError(f"decontamination.evals: there are no items in {', '.join(evals)}")


def _filter(corpus: Corpus, number: int) -> None:
    """Reads an input file, applies the rules, and writes documents, keys and counts."""
    file, source, config = corpus.files[number], corpus.source_of(number), corpus.config
    path = local_copy(file.stored, corpus.work / "objects")
    counts, last = RuleCounts(), [0]
    with new_directory(corpus.path("filter", number)) as folder:
        exact, bands = SortedWriter(folder, "exact", EXACT), SortedWriter(folder, "bands", BAND)

        def kept() -> Iterator[tuple[int, str]]:
            for one in read_rows_of(path, file.name, file.kind, source, config.max_characters) if file.size else ():
                counts.read, last[0] = counts.read + 1, one.row
                where = at(file.name, one.row)
                if one.rule:
                    counts.drop(one.rule, where, one.text, one.why)
                    continue
                text, rule, masked = corpus.rules.apply(one.text)
                if rule:
                    counts.drop(rule, where, one.text)
                    continue
                counts.masked.update(masked)
                me = document_id(number, counts.kept)
                if config.dedup:
                    listed = words(text)
                    exact.add(*near_duplicates.exact_keys(text, listed), me)
                    if corpus.band_keys is not None:
                        bands.add(corpus.band_keys(listed), me)
                counts.kept += 1
                yield one.row, text

        write_documents(folder / "documents.arrow", kept())
        exact.close()
        bands.close()
        save_counts(folder / "counts.json", counts, last_row=last[0], sha256=content_sha256(path))
    if "://" in file.name:
        path.unlink(missing_ok=True)


def _exact(corpus: Corpus, number: int) -> None:
    """Finds documents with the words of an earlier one, in an interval of hashes."""
    records = near_duplicates.partition(corpus.keys("exact"), number, corpus.tasks("exact"))
    save_sorted(corpus.path("exact", number), near_duplicates.exact_pairs(records))


def _candidates(corpus: Corpus, number: int) -> None:
    """Finds pairs of documents to compare, in an interval of band keys."""
    records = near_duplicates.partition(corpus.keys("bands"), number, corpus.tasks("candidates"))
    save_sorted(corpus.path("candidates", number), near_duplicates.candidate_pairs(records))


def _near(corpus: Corpus, number: int) -> None:
    """Finds documents of an input file that are similar to an earlier one."""
    dedup = corpus.config.dedup
    assert dedup is not None
    pairs = near_duplicates.pairs_of_file(corpus.results("candidates"), number)
    equal = near_duplicates.pairs_of_file(corpus.results("exact"), number)
    pairs = pairs[~np.isin(pairs["id"], equal["id"])]
    text_of = TextLookup(corpus)
    found = near_duplicates.similar_documents(pairs, text_of, dedup.threshold, dedup.ngram_words)
    similar = [(one, other) for one, other, _ in found]
    save_sorted(corpus.path("near", number), np.array(similar, PAIR))


class TextLookup:
    """Texts of documents by id, from the files of the filter stage; the last files and batches used are held."""

    def __init__(self, corpus: Corpus):
        self._corpus = corpus
        self._stores: OrderedDict[int, DocumentStore] = OrderedDict()
        self._batches: OrderedDict[tuple[int, int], list[tuple[int, str]]] = OrderedDict()

    def __call__(self, number: int) -> str:
        return self.row(number)[1]

    def row(self, number: int) -> tuple[int, str]:
        """(row, text) of a document."""
        batch, place = divmod(number & 0xFFFFFFFF, BATCH)
        file = number >> 32
        return _recent(self._batches, (file, batch), lambda: self._store(file).batch(batch))[place]

    def _store(self, file: int) -> DocumentStore:
        path = self._corpus.path("filter", file) / "documents.arrow"
        return _recent(self._stores, file, lambda: DocumentStore(path))

    def where(self, number: int) -> str:
        """Input file and row of a document."""
        return at(self._corpus.files[number >> 32].name, self.row(number)[0])


def _recent(held: OrderedDict[Key, Value], key: Key, make: Callable[[], Value]) -> Value:
    """Value of a key among the last `HELD` used; made if it is not there."""
    if key not in held:
        held[key] = make()
        if len(held) > HELD:
            held.popitem(last=False)
    held.move_to_end(key)
    return held[key]


def _tokens(corpus: Corpus, number: int) -> None:
    """Tokenises the documents of an input file that are neither duplicates nor contaminated."""
    file, tokenizer, counts = corpus.files[number], corpus.tokenizer, RuleCounts()
    text_of = TextLookup(corpus)
    duplicates: dict[str, dict[int, int]] = {}
    for rule, stage in (("duplicate", "exact"), ("near_duplicate", "near")):
        if corpus.tasks(stage):
            paths = corpus.results("exact") if stage == "exact" else [corpus.path("near", number)]
            duplicates[rule] = dict(near_duplicates.pairs_of_file(paths, number).tolist())

    def kept() -> Iterator[str]:
        store = DocumentStore(corpus.path("filter", number) / "documents.arrow")
        for position, (row, text) in enumerate(store):
            where, me = at(file.name, row), document_id(number, position)
            rule = next((rule for rule, found in duplicates.items() if me in found), "")
            if rule:
                counts.drop(rule, where, text, f"of {text_of.where(duplicates[rule][me])}")
            elif corpus.evaluation is not None and (shared := corpus.evaluation.shared(text)):
                counts.drop("contaminated", where, text, f"shares n-grams with item {shared[0] + 1} of the evaluations")
            else:
                counts.kept += 1
                counts.characters += len(text)
                yield text

    lengths: list[int] = []
    with new_directory(corpus.path("tokens", number)) as folder:
        with (folder / "tokens.raw").open("wb") as tokens, (folder / "lengths.raw").open("wb") as sizes:
            for texts in _batches(kept()):
                encoded = tokenizer.encode_documents(texts)
                tokens.write(np.concatenate(encoded).astype(token_dtype(tokenizer)).tobytes())
                lengths = [len(one) for one in encoded]
                sizes.write(np.array(lengths, "<i8").tobytes())
                counts.tokens += sum(lengths)
        save_counts(folder / "counts.json", counts)


def token_dtype(tokenizer: Tokenizer) -> np.dtype:
    """Type of stored tokens, as in token files."""
    return np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    held, size = [], 0
    for text in texts:
        held.append(text)
        size += len(text)
        if size >= ENCODE_CHARACTERS:
            yield held
            held, size = [], 0
    if held:
        yield held


def plan_shards(corpus: Corpus) -> Iterator[dict[str, Any]]:
    """Output shards of each source: a shard ends with the document that reaches `shard_tokens`."""
    most = corpus.config.shard_tokens
    for index, source in enumerate(corpus.config.source):
        shard, pieces, room = 0, [], most
        for number, file in enumerate(corpus.files):
            path = corpus.path("tokens", number) / "lengths.raw"
            if file.source != index or not path.stat().st_size:
                continue
            ends = np.cumsum(np.memmap(path, "<i8", "r"))
            first = first_token = 0
            while first < len(ends):
                end = min(len(ends), int(np.searchsorted(ends, first_token + room)) + 1)
                end_token = int(ends[end - 1])
                pieces.append([number, first, end, first_token, end_token])
                room -= end_token - first_token
                first, first_token = end, end_token
                if room <= 0:
                    yield {"source": source.name, "file": f"{source.name}/{shard:05}.bin", "pieces": pieces}
                    shard, pieces, room = shard + 1, [], most
        if pieces:
            yield {"source": source.name, "file": f"{source.name}/{shard:05}.bin", "pieces": pieces}


def _shard(corpus: Corpus, number: int) -> None:
    """Writes an output shard: a token file."""
    shard, dtype = corpus.shards[number], token_dtype(corpus.tokenizer)

    def documents() -> Iterator[np.ndarray]:
        for file, first, end, begin, _ in shard["pieces"]:
            folder = corpus.path("tokens", file)
            tokens = np.memmap(folder / "tokens.raw", dtype, "r")
            for length in np.memmap(folder / "lengths.raw", "<i8", "r")[first:end].tolist():
                yield np.asarray(tokens[begin : begin + length])
                begin += length

    source = next(one for one in corpus.config.source if one.name == shard["source"])
    about = {"source": source.name, "license": source.license}
    write_tokens(corpus.out / shard["file"], documents(), corpus.tokenizer, about=about)


TASKS: dict[str, Callable[[Corpus, int], None]] = {
    "filter": _filter,
    "exact": _exact,
    "candidates": _candidates,
    "near": _near,
    "tokens": _tokens,
    "shards": _shard,
}


def write_plan(config: CorpusConfig, files: list[InputFile], work: Path, libraries: dict[str, Any]) -> None:
    """Writes the plan of a work folder, or checks that the one there is the same.

    Raises DataError naming what differs, if the folder was begun with other settings, inputs or libraries.
    """
    plan = {"config": to_dict(config), "files": [vars(one) for one in files], "libraries": libraries}
    plan = json.loads(json.dumps(plan))
    path = work / "plan.json"
    if not path.exists():
        write_json(path, plan)
    elif (before := read_json(path)) != plan:
        what = next(name for name in plan if before.get(name) != plan[name])
        raise DataError(f"{work.parent}: was begun with other {what} ({_difference(before.get(what), plan[what])}); "
                        "choose another `out`, or delete that folder")  # fmt: skip


def _difference(before: Any, now: Any, where: str = "") -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        for name in {**before, **now}:
            if before.get(name) != now.get(name):
                return _difference(before.get(name), now.get(name), f"{where}.{name}".lstrip("."))
    if isinstance(before, list) and isinstance(now, list):
        if len(before) != len(now):
            return f"{where or 'they'}: {len(before)} before, {len(now)} now"
        for index, (old, new) in enumerate(zip(before, now, strict=True)):
            if old != new:
                return _difference(old, new, f"{where}[{index}]")
    return f"{where}: {before!r} before, {now!r} now"
