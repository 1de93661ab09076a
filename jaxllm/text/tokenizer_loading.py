"""Tokenizer loading: detects the kind of file and opens it."""

from pathlib import Path

from jaxllm.files import DataError, at
from jaxllm.text.byte_tokenizer import ByteTokenizer
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.text.tokenizer_files import TOKENIZER_FILE, read_config

SENTENCEPIECE_FILE = "tokenizer.model"


def load_tokenizer(path: Path | str, *, split: str | None = None) -> Tokenizer:
    """Opens a tokenizer from a file or a folder.

    Legal files: `tokenizer.json`; a SentencePiece `*.model`; a tiktoken file (`*.tiktoken`, or a `tokenizer.model`
    that is one). A folder's `tokenizer.json` takes precedence. `tokenizer_config.json` and
    `generation_config.json` beside the file name the tokens that begin and end a document or a turn.

    Args:
        path: the file or the folder.
        split: pre-tokenizer of a tiktoken file, a name of `jaxllm.text.pretokenizers.SPLITS`; None for a published
            vocabulary.

    Raises:
        DataError: there is no tokenizer, its kind is unsupported, or its end-of-document token is unknown.
    """
    path = Path(path).expanduser()
    file = _find(path) if path.is_dir() else path
    if not file.is_file():
        raise DataError(
            f"{at(path)}: no tokenizer here; legal: 'byte', 'bpe:SIZE', or the path of a {TOKENIZER_FILE}, "
            f"a SentencePiece {SENTENCEPIECE_FILE}, or a .tiktoken file"
        )
    if split is not None and file.suffix == ".json":
        raise DataError(f"{at(file)}: contains its own pre-tokenizer; leave `split` out")
    config = read_config(file.parent)
    if config.get("jaxllm_tokenizer") == "byte":
        return ByteTokenizer()
    # Imported here, because importing the tokenizers library is slow.
    if file.suffix == ".json":
        from jaxllm.text.hf_tokenizer import HFTokenizer

        return HFTokenizer.from_file(file, config)
    from jaxllm.text import sentencepiece, tiktoken

    data = file.read_bytes()
    if file.suffix == ".tiktoken" or tiktoken.is_tiktoken(data):
        return tiktoken.open_tiktoken(file, data, config, split)
    if split is not None:
        raise DataError(f"{at(file)}: not a tiktoken file; `split` is for those only, leave it out")
    return sentencepiece.open_sentencepiece(file, data, config)


def _find(folder: Path) -> Path:
    for name in (TOKENIZER_FILE, SENTENCEPIECE_FILE):
        if (folder / name).is_file():
            return folder / name
    others = sorted(folder.glob("*.tiktoken"))
    if len(others) > 1:
        raise DataError(f"{at(folder)}: several tiktoken files ({', '.join(one.name for one in others)}); name one")
    return others[0] if others else folder / TOKENIZER_FILE
