"""BPE training: trains a byte-level BPE tokenizer on a corpus and caches it.

Byte-level (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", 2.2): merges run over the UTF-8
bytes of the text, so every text has an encoding and nothing is unknown.
"""

import json
import logging
from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxllm.files import DataError, atomic, digest, file_sha256, read_json
from jaxllm.text.byte_tokenizer import ByteTokenizer
from jaxllm.text.hf_tokenizer import HFTokenizer
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.text.tokenizer_files import CONFIG_FILE, TOKENIZER_FILE
from jaxllm.text.tokenizer_loading import load_tokenizer

log = logging.getLogger(__name__)


def train_bpe(texts: Iterable[str], vocab_size: int, *, where: str) -> HFTokenizer:
    """Trains a byte-level BPE with exactly `vocab_size` tokens: special tokens, 256 bytes, merges. Deterministic.

    Args:
        texts: training corpus.
        vocab_size: size of the vocabulary.
        where: name of the corpus in errors.

    Raises:
        DataError: the size is below that of bytes and special tokens, or above what the corpus has merges for.
    """
    specials = ByteTokenizer.SPECIALS
    least = 256 + len(specials)
    if vocab_size < least:
        raise DataError(f"bpe:{vocab_size}: too small; bytes and special tokens alone are {least}")
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(iter(texts), trainer)
    reached = library.get_vocab_size()
    if reached != vocab_size:
        raise DataError(
            f"{where}: the text is too short for 'bpe:{vocab_size}': the corpus has merges for {reached} tokens only; "
            f"use 'bpe:{reached}' or 'byte', or give more text"
        )
    return HFTokenizer(library.to_str(), bos=ByteTokenizer.BOS, eos=ByteTokenizer.EOS, where=f"bpe:{vocab_size}")


def cached_bpe(texts: Iterable[str], vocab_size: int, *, content_hash: str, where: str, cache: Path) -> Tokenizer:
    """`train_bpe` with a cache, keyed by `content_hash` and size. A damaged entry is trained again, never used."""
    folder = cache / "tokenizers" / f"bpe-{vocab_size}-{digest([content_hash, ByteTokenizer.SPECIALS])[:16]}"
    stamp = folder / "sha256.json"
    if stamp.is_file():
        try:
            found = {name: file_sha256(folder / name) for name in (TOKENIZER_FILE, CONFIG_FILE)}
            if found == read_json(stamp):
                return load_tokenizer(folder)
            log.warning("%s: does not match its hash; training the tokenizer again", folder)
        except (OSError, DataError) as error:
            log.warning("%s; training the tokenizer again", error)
    trained = train_bpe(texts, vocab_size, where=where)
    trained.save(folder)
    hashes = {name: file_sha256(folder / name) for name in (TOKENIZER_FILE, CONFIG_FILE)}
    with atomic(stamp) as file:  # written last: an entry without its hashes is incomplete
        file.write(json.dumps(hashes).encode())
    return trained
