"""Tokenizer cache: each source is tokenised once, in parts, by several processes, and kept as a token file.

The name of an entry is the hash of the text and of its encoding. A large source is encoded part by part; each part is
a file named by the hash of its text, so that an interrupted run resumes with the parts that are done. The parts are
then joined into one file, whose bytes do not depend on the number of processes or on interruptions.
"""

import hashlib
import logging
import multiprocessing
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.data.chat_encoding import ChatEncoder, EncodedDocument, Encoder, TextEncoder
from jaxllm.data.sources.documents import BadRecords, Document, Documents
from jaxllm.data.sources.remote_files import RemoteFile
from jaxllm.data.token_files import TokenDocuments, open_tokens, sidecar, write_tokens
from jaxllm.files import DataError, at, digest, read_json, write_json
from jaxllm.text import ChatTemplate, load_tokenizer

log = logging.getLogger(__name__)

ProgressCallback = Callable[[int, int], None]
"""(documents, tokens) so far."""

PART_CHARACTERS = 1 << 23
"""Characters in one part, which is encoded and cached as a unit."""


def tokenise_documents(
    documents: Documents,
    encoder: Encoder,
    cache: Path,
    *,
    workers: int = 0,
    progress: ProgressCallback | None = None,
) -> TokenDocuments:
    """Tokenises documents, or returns them from the tokenizer cache if it has them intact.

    A cache entry that cannot be opened or does not match its own hash is written again.

    Args:
        cache: root folder of the cache; entries are in its folder `tokens`.
        workers: processes that encode; 0 is this process, where many tokenizers use several threads.
        progress: called with (documents, tokens) so far.

    Raises DataError naming file and row for a document that cannot be encoded, unless bad records are skipped.
    """
    skips = ["skip"] if documents.bad.skip else []
    path = cache / "tokens" / f"{digest([documents.content_hash, encoder.fingerprint, *skips])[:32]}.bin"
    if sidecar(path).is_file() and path.is_file():
        try:
            return open_tokens(path, encoder.tokenizer, name=documents.name)
        except DataError as error:
            log.warning("%s; tokenising again", error)
    bad = BadRecords(documents.bad.skip)
    files: dict[str, list[int]] = {}
    done = [0, 0]

    def counted() -> Iterator[EncodedDocument]:
        for places, encoded in _parts(documents, encoder, path.with_suffix(".parts"), workers, bad):
            for (file, row), one in zip(places, encoded, strict=True):
                place = files.setdefault(file, [0, 0])
                place[0], place[1] = place[0] + 1, row
                done[0], done[1] = done[0] + 1, done[1] + len(one.ids)
                yield one
            if progress is not None:
                progress(done[0], done[1])

    about: dict[str, Any] = {}
    stream = counted()

    def described() -> Iterator[EncodedDocument]:
        yield from stream
        about["files"] = [{"file": file, "documents": n, "last_row": row} for file, (n, row) in files.items()]
        if documents.bad.count + bad.count:
            listed = [*documents.bad.listed, *bad.listed][: BadRecords.LISTED]
            about["skipped"] = {"unreadable": documents.bad.count, "unencodable": bad.count, "listed": listed}

    write_tokens(path, described(), encoder.tokenizer, about=about)
    shutil.rmtree(path.with_suffix(".parts"), ignore_errors=True)
    return open_tokens(path, encoder.tokenizer, name=documents.name)


Locations = list[tuple[str, int]]


def _parts(
    documents: Documents, encoder: Encoder, folder: Path, workers: int, bad: BadRecords
) -> Iterator[tuple[Locations, list[EncodedDocument]]]:
    """(locations, encoded documents) of each part in order, without documents that cannot be encoded."""
    if workers == 0:
        for number, part in enumerate(_split_parts(documents)):
            yield _encode_part(number, part, encoder, folder, bad)
        return
    with ExitStack() as stack:
        saved = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        encoder.tokenizer.save(saved)
        if load_tokenizer(saved).fingerprint != encoder.tokenizer.fingerprint:
            raise DataError(
                f"{documents.name}: the tokenizer changes when it is saved and loaded, so other processes cannot use "
                "it; set data.workers=0"
            )
        template = encoder.template if isinstance(encoder, ChatEncoder) else None
        arguments = (saved, template and template.sources, template and template.tokens, bad.skip)
        spawn = multiprocessing.get_context("spawn")
        pool = stack.enter_context(ProcessPoolExecutor(workers, spawn, _init_worker, arguments))
        stack.callback(pool.shutdown, cancel_futures=True)
        waiting: deque[Future[tuple[Locations, list[EncodedDocument], int, list[str]]]] = deque()

        def next_part() -> tuple[Locations, list[EncodedDocument]]:
            places, encoded, count, listed = waiting.popleft().result()
            bad.count += count
            bad.listed += listed[: BadRecords.LISTED - len(bad.listed)]
            return places, encoded

        for number, part in enumerate(_split_parts(documents)):
            listed = [(one.text, str(one.file), one.row) for one in part]
            waiting.append(pool.submit(_encode_in_worker, number, listed, folder))
            if len(waiting) > 2 * workers:
                yield next_part()
        while waiting:
            yield next_part()


def _split_parts(documents: Documents) -> Iterator[list[Document]]:
    part, size = [], 0
    for document in documents:
        part.append(document)
        size += len(document.text)
        if size >= PART_CHARACTERS:
            yield part
            part, size = [], 0
    if part:
        yield part


def _encode_part(
    number: int, part: list[Document], encoder: Encoder, folder: Path, bad: BadRecords
) -> tuple[Locations, list[EncodedDocument]]:
    """Encodes one part, or reads it from its file if that exists; a source with a single part needs no file."""
    size = sum(len(one.text) for one in part)
    if size < PART_CHARACTERS and number == 0:
        return _encode_located(part, encoder, bad)
    hasher = hashlib.blake2b(encoder.fingerprint.encode(), digest_size=8)
    for one in part:
        hasher.update(len(one.text).to_bytes(8, "little") + one.text.encode(errors="surrogatepass"))
    path = folder / f"{number:06}-{hasher.hexdigest()}.bin"
    notes = path.with_suffix(".notes.json")
    try:
        found, kept = list(open_tokens(path, encoder.tokenizer).encoded()), read_json(notes)
        bad.count += kept["bad"]
        bad.listed += kept["listed"]
        return [(str(part[index].file), part[index].row) for index in kept["good"]], found
    except DataError:
        pass  # missing or incomplete
    own = BadRecords(bad.skip)
    good, encoded = _encode_valid(part, encoder, own)
    if encoded:
        write_json(notes, {"good": good, "bad": own.count, "listed": own.listed})
        write_tokens(path, encoded, encoder.tokenizer)
    bad.count += own.count
    bad.listed += own.listed[: BadRecords.LISTED - len(bad.listed)]
    return [(str(part[index].file), part[index].row) for index in good], encoded


def _encode_located(part: list[Document], encoder: Encoder, bad: BadRecords) -> tuple[Locations, list[EncodedDocument]]:
    good, encoded = _encode_valid(part, encoder, bad)
    return [(str(part[index].file), part[index].row) for index in good], encoded


def _encode_valid(part: list[Document], encoder: Encoder, bad: BadRecords) -> tuple[list[int], list[EncodedDocument]]:
    """(indices, encoded documents) of those that can be encoded; the others are reported with file and row."""
    try:
        return list(range(len(part))), encoder.encode([one.text for one in part])
    except DataError:
        pass
    good, encoded = [], []
    for index, document in enumerate(part):  # one by one, so that the error names the document
        try:
            encoded += encoder.encode([document.text])
            good.append(index)
        except DataError as error:
            bad.report(DataError(f"{at(document.file, document.row)}: {error}"))
    return good, encoded


_worker: dict[str, Any] = {}
"""State of a worker process: its encoder, and whether bad records are skipped."""


def _init_worker(saved: Path, sources: dict[str, str] | None, tokens: dict[str, str | None] | None, skip: bool) -> None:
    tokenizer = load_tokenizer(saved)
    encoder: Encoder = TextEncoder(tokenizer)
    if sources is not None:
        named = {name: token for name, token in (tokens or {}).items() if token is not None}
        encoder = ChatEncoder(tokenizer, ChatTemplate(sources, tokens=named))
        encoder.template.tokens = dict(tokens or {})
    _worker.update(encoder=encoder, skip=skip)


def _encode_in_worker(
    number: int, part: list[tuple[str, str, int]], folder: Path
) -> tuple[Locations, list[EncodedDocument], int, list[str]]:
    bad = BadRecords(_worker["skip"])
    documents = [Document(text, RemoteFile(file), row) for text, file, row in part]
    places, encoded = _encode_part(number, documents, _worker["encoder"], folder, bad)
    found = [EncodedDocument(np.asarray(one.ids), one.loss_mask) for one in encoded]
    return places, found, bad.count, bad.listed
