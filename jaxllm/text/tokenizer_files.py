"""The files of a tokenizer's folder, in the layout that transformers uses too."""

from pathlib import Path
from typing import Any

from jaxllm.files import DataError, at, read_json, write_json

CONFIG_FILE = "tokenizer_config.json"
TOKENIZER_FILE = "tokenizer.json"
GENERATION_FILE = "generation_config.json"
MODEL_FILE = "config.json"


def write_config(folder: Path, bos: str | None, eos: str | None, *, kind: str, adds_bos: bool = True) -> None:
    """`tokenizer_config.json`, the neighbour that names the tokens which begin and end a document."""
    names = {"bos_token": bos, "eos_token": eos}
    about = {} if adds_bos else {"add_bos_token": False}
    write_json(
        folder / CONFIG_FILE,
        {"tokenizer_class": "PreTrainedTokenizerFast", **names, **about, "jaxllm_tokenizer": kind},
    )


def read_config(folder: Path) -> dict[str, Any]:
    """`tokenizer_config.json`, or {} where there is none."""
    return read_object(folder / CONFIG_FILE) if (folder / CONFIG_FILE).is_file() else {}


def read_object(file: Path) -> dict[str, Any]:
    """Raises DataError when the file is missing or is no JSON object."""
    found = read_json(file)
    if not isinstance(found, dict):
        raise DataError(f"{at(file)}: a {type(found).__name__} at the top; it is an object of names and values")
    return found


def write_stop_ids(folder: Path, stop_ids: tuple[int, ...]) -> None:
    write_json(folder / GENERATION_FILE, {"eos_token_id": list(stop_ids)})


def read_stop_ids(folder: Path) -> tuple[int, ...]:
    """`eos_token_id` of generation_config.json, or of config.json: one id or several; () where there is none.

    Raises DataError for what is no id.
    """
    for name in (GENERATION_FILE, MODEL_FILE):
        if (folder / name).is_file():
            found = read_object(folder / name).get("eos_token_id")
            if found is not None:
                ids = tuple(found) if isinstance(found, list) else (found,)
                if any(type(one) is not int for one in ids):
                    raise DataError(
                        f"{at(folder / name)}: eos_token_id is {found!r}; it is a token's number, or a list of them"
                    )
                return ids
    return ()


def token_name(token: Any) -> str | None:
    """A token in tokenizer_config.json is its name or an object with `content`."""
    name = token.get("content") if isinstance(token, dict) else token
    if name is not None and not isinstance(name, str):
        raise DataError(f"{CONFIG_FILE}: {token!r} is no token; it is a name, or an object with 'content'")
    return name
