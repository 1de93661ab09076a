"""Rephrasing (synthetic data): documents rewritten in named styles by an OpenAI-compatible endpoint (arXiv:2401.16380).

The job writes JSON lines, one for each document and style, in the order in which answers arrive. Rows that exist are
not requested again, so an interrupted job resumes. A data mixture then blends the file with the original text:

    mixture=(SourceConfig("web", "web.jsonl", weight=1), SourceConfig("qa", "rephrased.jsonl", weight=1))
"""

import hashlib
import json
import os
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxllm.data.sources.documents import Document
from jaxllm.files import DataError, at

STYLES = {
    "easy": "Rewrite the following text so that a small child understands it. Use short sentences and simple words.",
    "medium": "Rewrite the following text in clear, high-quality English, as an encyclopedia would have it.",
    "hard": "Rewrite the following text in terse, precise language that only a scholar of the field will understand.",
    "qa": 'Turn the following text into a conversation of several questions, each after "Question:", and their '
    'answers, each after "Answer:".',
}
"""The four styles of WRAP, in our words. A custom style is a name and an instruction."""
PROMPT_SUFFIX = "Keep every fact, add none, and answer with the rewritten text alone.\n\nThe text:\n"
RETRY_STATUSES = (408, 409, 425, 429, 500, 502, 503, 504)


@dataclass(frozen=True)
class Endpoint:
    """OpenAI-compatible endpoint: `url` ends in /v1; `model` is the model's name there.

    key: API key; empty takes OPENAI_API_KEY from the environment.
    timeout: seconds for one request. retries: further attempts after a failed one.
    """

    url: str
    model: str
    key: str = ""
    max_tokens: int = 1024
    temperature: float = 0.7
    timeout: float = 120.0
    retries: int = 5
    wait: float = 1.0
    """Seconds before the first retry; doubled each time, with jitter."""


@dataclass(frozen=True)
class RephraseResult:
    """Counts of a rephrasing job.

    written: new rows. before: rows that existed. refused: empty or truncated answers. failed: errors of requests that
    failed after all retries.
    """

    written: int
    before: int
    refused: int
    failed: tuple[str, ...]


class EndpointError(DataError):
    """Error: the endpoint cannot be used; the message contains its answer."""


def rephrase(
    documents: Iterable[Document],
    styles: dict[str, str],
    endpoint: Endpoint,
    out: Path,
    *,
    concurrency: int = 8,
    progress: Callable[[int], None] | None = None,
) -> RephraseResult:
    """Writes {"text", "style", "of"} for each document and style to `out`, a JSONL file; "of" is the original's hash.

    A text that `out` already has in the same style is not requested again. Answers that are empty or were truncated at
    max_tokens are skipped and counted. Requests that fail after all retries are reported with their errors; the next
    run sends them again.

    Args:
        styles: name -> instruction.
        concurrency: requests in flight at a time.
        progress: called with the number of answers.

    Raises EndpointError if the server rejects the request itself (400, 401, 403, 404), since any other would fail too;
    ValueError for illegal settings.
    """
    if concurrency < 1 or not styles:
        raise ValueError(f"concurrency is {concurrency}, styles are {sorted(styles)}; give one or more of each")
    done = _finished_jobs(out)
    written = before = refused = 0
    failed: list[str] = []
    lock = threading.Lock()
    out.parent.mkdir(parents=True, exist_ok=True)
    jobs = ((one, style, text_hash(one.text)) for one in documents for style in styles)
    with out.open("ab") as file, ThreadPoolExecutor(concurrency) as pool:

        def answer(document: Document, style: str, key: str) -> str:
            text = _complete(endpoint, f"{styles[style]} {PROMPT_SUFFIX}{document.text}")
            if text is None:
                return "refused"
            row = {"text": text, "style": style, "of": key}
            with lock:
                file.write((json.dumps(row, ensure_ascii=False) + "\n").encode())
                file.flush()
            return "written"

        waiting: dict[Future[str], str] = {}
        try:
            for document, style, key in _mark_new_jobs(jobs, done):
                if document is None:
                    before += 1
                    continue
                waiting[pool.submit(answer, document, style, key)] = f"{at(document.file, document.row)} ({style})"
                while len(waiting) >= 2 * concurrency:
                    written, refused = _collect_finished(waiting, written, refused, failed, progress)
            while waiting:
                written, refused = _collect_finished(waiting, written, refused, failed, progress)
        except BaseException:
            for one in waiting:
                one.cancel()
            raise
    return RephraseResult(written, before, refused, tuple(failed))


def text_hash(text: str) -> str:
    """Hash that identifies a document in the output."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _mark_new_jobs(
    jobs: Iterator[tuple[Document, str, str]], done: set[tuple[str, str]]
) -> Iterator[tuple[Document | None, str, str]]:
    for document, style, key in jobs:
        known = (key, style) in done
        done.add((key, style))  # equal documents are requested once
        yield (None if known else document), style, key


def _collect_finished(
    waiting: dict[Future[str], str],
    written: int,
    refused: int,
    failed: list[str],
    progress: Callable[[int], None] | None,
) -> tuple[int, int]:
    for one in wait(waiting, return_when=FIRST_COMPLETED).done:
        place = waiting.pop(one)
        try:
            result = one.result()
        except EndpointError:
            raise
        except DataError as error:
            failed.append(f"{place}: {error}")
            continue
        written, refused = written + (result == "written"), refused + (result == "refused")
        if progress is not None:
            progress(written)
    return written, refused


def _finished_jobs(out: Path) -> set[tuple[str, str]]:
    """(hash, style) of the rows in `out`; a last line that an interrupted job left incomplete is removed."""
    if not out.exists():
        return set()
    raw = out.read_bytes()
    if (end := raw.rfind(b"\n") + 1) < len(raw):
        with out.open("r+b") as file:
            file.truncate(end)
    found = set()
    for row, line in enumerate(raw[:end].splitlines(), start=1):
        try:
            record = json.loads(line)
            found.add((record["of"], record["style"]))
        except (ValueError, KeyError, TypeError):
            raise DataError(f"{at(out, row)}: not a row of a rephrasing job; write to another file") from None
    return found


def _complete(endpoint: Endpoint, prompt: str) -> str | None:
    """Completion of a prompt; None if it is empty or was truncated. Raises DataError after all retries."""
    body = {
        "model": endpoint.model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": endpoint.max_tokens,
        "temperature": endpoint.temperature,
    }
    key = endpoint.key or os.environ.get("OPENAI_API_KEY", "")
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    url = endpoint.url.rstrip("/") + "/chat/completions"
    if not url.startswith(("http://", "https://")):
        raise EndpointError(f"{endpoint.url}: the URL of an endpoint must begin with http:// or https://")
    why = ""
    for attempt in range(endpoint.retries + 1):
        if attempt:
            time.sleep(endpoint.wait * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))
        try:
            request = urllib.request.Request(url, json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request, timeout=endpoint.timeout) as answer:
                return _text(json.loads(answer.read()))
        except urllib.error.HTTPError as error:
            with error:
                why = f"status {error.code}: {error.read()[:300].decode(errors='replace')}"
            if error.code not in RETRY_STATUSES:
                raise EndpointError(f"{url} rejects the request with {why}") from None
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:  # no connection, or a malformed answer
            why = f"{type(error).__name__}: {error}"
    raise DataError(f"{url} failed {endpoint.retries + 1} times; the last error is {why}")


def _text(answer: dict[str, Any]) -> str | None:
    choice = answer["choices"][0]
    text = (choice["message"]["content"] or "").strip()
    return None if not text or choice.get("finish_reason") == "length" else text
