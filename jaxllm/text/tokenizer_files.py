"""Tokenizer files: names, reading and writing of a tokenizer's folder in the layout of transformers."""

from pathlib import Path
from typing import Any

from jaxllm.files import DataError, at, read_json, write_json

CONFIG_FILE = "tokenizer_config.json"
TOKENIZER_FILE = "tokenizer.json"
GENERATION_FILE = "generation_config.json"
MODEL_FILE = "config.json"


def write_config(folder: Path, bos: str | None, eos: str | None, *, kind: str, adds_bos: bool = True) -> None:
    """Writes `tokenizer_config.json`, which names the tokens that begin and end a document."""
    names = {"bos_token": bos, "eos_token": eos}
    about = {} if adds_bos else {"add_bos_token": False}
    write_json(
        folder / CONFIG_FILE,
        {"tokenizer_class": "PreTrainedTokenizerFast", **names, **about, "jaxllm_tokenizer": kind},
    )


def read_config(folder: Path) -> dict[str, Any]:
    """Contents of `tokenizer_config.json`, or {} where there is none."""
    return read_object(folder / CONFIG_FILE) if (folder / CONFIG_FILE).is_file() else {}


def read_object(file: Path) -> dict[str, Any]:
    """Reads a JSON file whose top level is an object.

    Raises:
        DataError: the file is missing or is not a JSON object.
    """
    found = read_json(file)
    if not isinstance(found, dict):
        raise DataError(f"{at(file)}: a {type(found).__name__} at the top level; legal: a JSON object")
    return found


def write_stop_ids(folder: Path, stop_ids: tuple[int, ...]) -> None:
    """Writes `generation_config.json` with the ids of the tokens that end generation."""
    write_json(folder / GENERATION_FILE, {"eos_token_id": list(stop_ids)})


def read_stop_ids(folder: Path) -> tuple[int, ...]:
    """Stop ids: `eos_token_id` of generation_config.json, else of config.json; () where there is none.

    Raises:
        DataError: the value is neither a token id nor a list of them.
    """
    for name in (GENERATION_FILE, MODEL_FILE):
        if (folder / name).is_file():
            found = read_object(folder / name).get("eos_token_id")
            if found is not None:
                ids = tuple(found) if isinstance(found, list) else (found,)
                if any(type(one) is not int for one in ids):
                    raise DataError(
                        f"{at(folder / name)}: eos_token_id is {found!r}; legal: a token id, or a list of them"
                    )
                return ids
    return ()


def token_name(token: Any) -> str | None:
    """Name of a token in tokenizer_config.json, which is a string or an object with `content`.

    Raises:
        DataError: it is neither.
    """
    name = token.get("content") if isinstance(token, dict) else token
    if name is not None and not isinstance(name, str):
        raise DataError(f"{CONFIG_FILE}: {token!r} is not a token; legal: a name, or an object with 'content'")
    return name
