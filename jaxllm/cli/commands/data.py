"""``jaxllm data``: inspects, tokenizes, packs, cleans and mixes data."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from jaxllm.cli.command_parser import parse_command
from jaxllm.cli.commands.data_mix import mix
from jaxllm.config import closest
from jaxllm.data.config import Format

if TYPE_CHECKING:
    from jaxllm.data.config import SourceConfig
    from jaxllm.data.sources.documents import Document, Documents
    from jaxllm.data.token_files import TokenDocuments
    from jaxllm.text import ChatTemplate, Tokenizer


@dataclass(frozen=True)
class DataInput:
    """DataInput files of a data command."""

    source: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE ...")]
    """Files or URLs, the folder of a saved Hugging Face data set, shakespeare, or chitchat."""
    source_format: Format = "auto"
    """File format; auto detects it from the file name."""
    content: Literal["text", "chat"] = "text"
    """chat: conversations, rendered with the chat template of --model."""
    text_field: str = "text"
    """Field of a record that holds the text, or a conversation's messages."""
    skip_bad_records: bool = False
    """Skip and count invalid records instead of stopping at the first."""

    def config(self) -> SourceConfig:
        """Configuration of the data source.

        Raises:
            DataError: no files are given.
        """
        from jaxllm.data import SourceConfig
        from jaxllm.files import DataError

        if not self.source:
            raise DataError("no input: name files after the command, or shakespeare, or chitchat")
        return SourceConfig(
            "source",
            self.source,
            source_format=self.source_format,
            content=self.content,
            text_field=self.text_field,
        )

    def documents(self) -> Documents:
        """Opens the documents of the source."""
        from jaxllm.data.loader import open_documents

        return open_documents(self.config(), skip_bad_records=self.skip_bad_records)


@dataclass(frozen=True)
class TokenizerOptions:
    """Tokenizer of a data command, and its chat template."""

    tokenizer: str = ""
    """byte, or the path of a tokenizer; bpe:SIZE trains one on the source."""
    model: str = ""
    """Alternatively, a model whose tokenizer and chat template to use, for example smollm2."""

    def open(self, source: DataInput) -> tuple[Tokenizer, ChatTemplate | None]:
        """Opens the tokenizer, and the chat template if there is one; ``source`` is for training a BPE.

        Raises:
            DataError: not exactly one of --tokenizer and --model is given.
        """
        from jaxllm.data.loader import resolve_tokenizer
        from jaxllm.files import DataError
        from jaxllm.text import load_template, load_tokenizer

        if bool(self.tokenizer) == bool(self.model):
            raise DataError("give one of --tokenizer and --model")
        if self.model:
            from jaxllm.hub import find_model, open_source

            path = find_model(self.model)
            if (path / "checkpoints").is_dir():
                return load_tokenizer(path / "tokenizer"), load_template(path / "tokenizer")
            found = open_source(path)
            return found.tokenizer, found.template
        template = load_template(self.tokenizer) if Path(self.tokenizer).exists() else None
        return resolve_tokenizer(self.tokenizer, source.documents), template


DataInputArgs = Annotated[DataInput, tyro.conf.arg(name="")]
TokenizerArgs = Annotated[TokenizerOptions, tyro.conf.arg(name="")]


def data(argv: list[str]) -> int:
    """Inspect, tokenize, pack, clean and mix data: `jaxllm data COMMAND FILES`."""
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: jaxllm data COMMAND FILES ... [--setting value ...]\n\ncommands:")
        for name, function in COMMANDS.items():
            print(f"  {name:14} {(function.__doc__ or '').splitlines()[0]}")
        print("\n`jaxllm data COMMAND --help` explains a command.")
        return 0
    if argv[0] not in COMMANDS:
        print(f"jaxllm data: no command {argv[0]!r}.{closest(argv[0], COMMANDS)} There are: {', '.join(COMMANDS)}.",
              file=sys.stderr)  # fmt: skip
        return 2
    return parse_command(COMMANDS[argv[0]], argv[1:], f"jaxllm data {argv[0]}")


def inspect(read: DataInputArgs, show: int = 2) -> int:
    """Count documents and bad records, and show the first documents.

    Args:
        show: number of documents to show.
    """
    from jaxllm.data.quality.corpus_stats import length_stats

    documents = read.documents()
    shown: list[Document] = []
    lengths, files = [], Counter()
    with bar("reading") as progress:
        for document in documents:
            lengths.append(len(document.text))
            files[str(document.file)] += 1
            if len(shown) < show:
                shown.append(document)
            if len(lengths) % 1000 == 0:
                progress(len(lengths), sum(lengths[-1000:]))
    for file, count in files.items():
        print(f"{file}: {count:,} documents")
    known = length_stats(lengths)
    print(f"{known.count:,} documents, {known.total:,} characters; p50 {known.p50:,}, p90 {known.p90:,}, "
          f"p99 {known.p99:,}, longest {known.most:,}")  # fmt: skip
    report_bad(documents.bad.count, documents.bad.listed)
    for document in shown:
        print(f"\n--- {document.file}:{document.row}\n{document.text[:600]}" + "..." * (len(document.text) > 600))
    return 0


def tokenize(read: DataInputArgs, words: TokenizerArgs, out: Path, workers: int = 0) -> int:
    """Write a token file for data.source: OUT.bin and OUT.bin.json, and its tokenizer.

    A stopped run resumes from the cache.

    Args:
        out: file to write; ends in .bin.
        workers: number of tokenizing processes; 0: tokenize in this process.
    """
    from jaxllm.data import write_tokens
    from jaxllm.files import DataError

    if out.suffix != ".bin":
        raise DataError(f"{out}: the name of a token file must end in .bin")
    tokens, tokenizer = tokenized_with_bar(read, words, workers)
    write_tokens(out, tokens.encoded(), tokenizer, about=tokens.about)
    print(f"{out}: {len(tokens.starts):,} documents, {tokens.total:,} tokens")
    tokenizer.save(out.with_suffix(""))
    print(f"{out.with_suffix('')}: the tokenizer, for data.tokenizer")
    return 0


def pack(
    read: DataInputArgs, words: TokenizerArgs, seq_len: int = 4096, picture: Path | None = None, workers: int = 0
) -> int:
    """Show how full the rows are with each kind of sequence packing.

    Args:
        seq_len: sequence length of a row in tokens.
        picture: PNG file to draw: document lengths and fill of the rows.
        workers: number of tokenizing processes; 0: tokenize in this process.
    """
    from jaxllm.data.loader import PACKINGS

    tokens, _ = tokenized_with_bar(read, words, workers)
    lengths = tokens.lengths
    if read.content == "chat":
        cut = int((lengths > seq_len + 1).sum())
        tokens = tokens.truncate(seq_len + 1)
        print(f"{cut:,} of {len(lengths):,} conversations are longer than a row and are truncated")
    names = [name for name in PACKINGS if name == "documents" or read.content == "text"]
    plans = {name: PACKINGS[name](tokens.starts, tokens.lengths, seq_len) for name in names}
    for name, plan in plans.items():
        print(f"{name:10} {plan.rows:,} rows of {seq_len:,}: {1 - plan.padding:.2%} full, {plan.padding:.2%} padding, "
              f"{plan.pairs / max(1, plan.rows):,.0f} targets a row")  # fmt: skip
    if picture is not None:
        from jaxllm.data.quality.length_plot import plot_lengths

        plot_lengths(lengths, plans, picture, tokens.name)
        print(picture)
    return 0


def stats(read: DataInputArgs, words: TokenizerArgs) -> int:
    """Show lengths, languages, characters and tokens of documents."""
    from jaxllm.data.quality.corpus_stats import length_stats
    from jaxllm.data.quality.language import detect_language

    characters, spoken = [], Counter()
    documents = read.documents()
    for document in documents:
        characters.append(len(document.text))
        spoken[detect_language(document.text)] += 1
    rows = {"characters": length_stats(characters)}
    if words.tokenizer or words.model:
        tokens, _ = tokenized_with_bar(read, words, 0)
        rows["tokens"] = length_stats(tokens.lengths)
    print(f"{documents.name}: {len(characters):,} documents")
    for name, known in rows.items():
        print(f"  {name:10} {known.total:,}; shortest {known.least:,}, p50 {known.p50:,}, p90 {known.p90:,}, "
              f"p99 {known.p99:,}, longest {known.most:,}")  # fmt: skip
    print("  languages  " + ", ".join(f"{name} {n / len(characters):.1%}" for name, n in spoken.most_common()))
    report_bad(documents.bad.count, documents.bad.listed)
    return 0


def dedup(read: DataInputArgs, out: Path, threshold: float = 0.8, exact: bool = False) -> int:
    """Remove duplicate documents and write the rest as JSON lines.

    Args:
        out: JSONL file to write.
        threshold: Jaccard similarity of 5-grams of words from which on documents are near-duplicates.
        exact: remove exact duplicates only.
    """
    from jaxllm.data.quality.dedup import find_duplicates

    documents = read.documents()
    found = find_duplicates((one.text for one in documents), threshold=None if exact else threshold)
    kept = write_selected(documents, found.keep, out, read)
    print(f"{len(found.keep):,} documents: {found.exact:,} exact duplicates, {found.near:,} near-duplicates; "
          f"{out}: {kept:,} documents")  # fmt: skip
    return 0


def contamination(
    read: DataInputArgs,
    evals: tuple[str, ...],
    evals_field: str = "text",
    run: int = 13,
    out: Path | None = None,
) -> int:
    """Search documents for items of evaluation sets; the exit status is 1 if any is found.

    Args:
        evals: files of the evaluation set, one item per record.
        evals_field: field of a record that holds an item's text.
        run: number of consecutive words that an item and a document must share (n-gram size).
        out: JSONL file to write the uncontaminated documents to.
    """
    import numpy as np

    from jaxllm.data import SourceConfig
    from jaxllm.data.loader import open_documents
    from jaxllm.data.quality.contamination import find_contamination

    documents = read.documents()
    items = [one.text for one in open_documents(SourceConfig("evaluation", evals, text_field=evals_field))]
    found = find_contamination((one.text for one in documents), items, ngram_words=run)
    print(f"{len(found.found):,} of {found.items - found.short:,} items ({found.share:.1%}) share {run} words in a row "
          f"with {len(found.documents):,} documents; {found.short:,} items are too short to search for")  # fmt: skip
    for number, share in sorted(found.found.items(), key=lambda one: -one[1])[:5]:
        print(f"  item {number + 1}, {share:.0%} of it: {items[number][:90]!r}")
    if out is not None:
        keep = ~np.isin(np.arange(sum(1 for _ in documents)), found.documents)
        print(f"{out}: {write_selected(documents, keep, out, read):,} documents")
    return 1 if found.found else 0


def rephrase(
    read: DataInputArgs,
    out: Path,
    url: str,
    model: str,
    styles: tuple[str, ...] = ("qa",),
    concurrency: int = 8,
    max_tokens: int = 1024,
    temperature: float = 0.7,
) -> int:
    """Rephrase documents through an OpenAI-compatible endpoint (WRAP, arXiv:2401.16380); resumes a stopped run.

    Args:
        out: JSONL file to write; mix it with the original by data.mixture.
        url: URL of the endpoint, ending in /v1. $OPENAI_API_KEY is sent as its key.
        model: name of the model at the endpoint.
        styles: easy, medium, hard, qa, or "NAME=INSTRUCTION" for a custom style.
        concurrency: number of concurrent requests.
        max_tokens: maximum length of an answer; longer answers are dropped.
        temperature: sampling temperature.
    """
    from jaxllm.data.quality.rephrase import STYLES, Endpoint
    from jaxllm.data.quality.rephrase import rephrase as run
    from jaxllm.files import DataError

    chosen = {}
    for style in styles:
        name, equals, instruction = style.partition("=")
        if not equals and name not in STYLES:
            raise DataError(
                f"no style {name!r}.{closest(name, STYLES)} Legal: {', '.join(STYLES)}; or NAME=INSTRUCTION"
            )
        chosen[name] = instruction if equals else STYLES[name]
    endpoint = Endpoint(url, model, max_tokens=max_tokens, temperature=temperature)
    with bar("rephrasing") as progress:
        made = run(read.documents(), chosen, endpoint, out, concurrency=concurrency,
                   progress=lambda n: progress(n, 0))  # fmt: skip
    print(f"{out}: {made.written:,} written, {made.before:,} there before, {made.refused:,} empty or cut answers, "
          f"{len(made.failed):,} failed")  # fmt: skip
    for one in made.failed[:5]:
        print(f"  {one}", file=sys.stderr)
    return 1 if made.failed else 0


def prepare(corpus: tyro.conf.Positional[Path], on: str = "local", workers: int = 1, part: str = "") -> int:
    """Prepare a corpus from a TOML file: filter, deduplicate, decontaminate and tokenize; resumes a stopped run.

    Args:
        corpus: TOML file with the settings of the corpus.
        on: local; slurm; ray (the cluster of this machine) or ray://HOST:PORT.
        workers: processes of this machine, size of the Slurm array, or Ray tasks at a time. The output does not
            depend on it.
        part: run only a part of a stage, STAGE:I/N, or finish; the scripts for Slurm use it.
    """
    from jaxllm.cli.corpus_preparation import prepare_from_file

    return prepare_from_file(corpus, on, workers, part)


def tokenized_with_bar(read: DataInput, words: TokenizerOptions, workers: int) -> tuple[TokenDocuments, Tokenizer]:
    """Tokenized documents of the source, from the cache or tokenized now with a progress bar."""
    from jaxllm.data.loader import make_encoder
    from jaxllm.data.tokenise import tokenise_documents
    from jaxllm.files import cache_root

    tokenizer, template = words.open(read)
    encoder = make_encoder(read.content, tokenizer, template)
    with bar("tokenising") as progress:
        tokens = tokenise_documents(read.documents(), encoder, cache_root(""), workers=workers, progress=progress)
    if skipped := tokens.about.get("skipped"):
        report_bad(skipped["unreadable"] + skipped["unencodable"], skipped["listed"])
    return tokens, tokenizer


def write_selected(documents: Documents, keep: Any, out: Path, read: DataInput) -> int:
    """Writes the documents where ``keep`` is true as JSON lines, in the format of the input; returns their number."""
    from jaxllm.files import atomic

    with atomic(out) as file:
        for document, wanted in zip(documents, keep, strict=True):
            if wanted:
                record = json.loads(document.text) if read.content == "chat" else {"text": document.text}
                file.write((json.dumps(record, ensure_ascii=False) + "\n").encode())
    return int(keep.sum())


def report_bad(count: int, listed: list[str]) -> None:
    """Prints the number of skipped records, and the first of them, on stderr."""
    if count:
        print(f"{count:,} bad records skipped:", file=sys.stderr)
        for one in listed[:5]:
            print(f"  {one}", file=sys.stderr)


@contextmanager
def bar(verb: str) -> Iterator[Callable[[int, int], None]]:
    """Progress line on the terminal, removed at the end; call the yielded ``progress(documents, tokens)``."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn(verb), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("")

        def progress(documents: int, tokens: int) -> None:
            shown.update(task, description=f"{documents:,} documents" + (f", {tokens:,} tokens" if tokens else ""))

        yield progress


COMMANDS: dict[str, Callable[..., int]] = {
    "inspect": inspect,
    "tokenize": tokenize,
    "pack": pack,
    "stats": stats,
    "dedup": dedup,
    "contamination": contamination,
    "rephrase": rephrase,
    "mix": mix,
    "prepare": prepare,
}
