"""docs/serve/sampling.md has a row for every sampling parameter, from the docstring of ``SamplingParams``.

`python -m tests.infer.test_sampling_docs` writes them there.
"""

from __future__ import annotations

import dataclasses
import inspect
import re

from jaxllm.infer import SamplingParams
from tests import environment

PAGE = environment.ROOT / "docs" / "serve" / "sampling.md"
BEGIN, END = "<!-- from the docstring of SamplingParams -->\n", "<!-- end -->\n"


def table() -> str:
    """Name, default and meaning of each field."""
    text = inspect.cleandoc(SamplingParams.__doc__ or "").split("Attributes:\n")[1]
    meanings = {}
    for part in re.split(r"\n(?=    \w)", text.rstrip()):
        name, meaning = part.strip().split(": ", 1)
        meanings[name] = " ".join(meaning.split()).replace("|", "\\|")
    fields = {field.name: field for field in dataclasses.fields(SamplingParams)}
    assert list(meanings) == list(fields), "each field is described, in order"
    rows = ["| parameter | default | |\n|---|---|---|\n"]
    for name, field in fields.items():
        default = "{}" if field.default is dataclasses.MISSING else repr(field.default)
        rows.append(f"| `{name}` | `{default}` | {meanings[name]} |\n")
    return "".join(rows)


def test_the_table_is_the_dataclass():
    text = PAGE.read_text()
    assert text.split(BEGIN)[1].split(END)[0] == table(), "run: python -m tests.infer.test_sampling_docs"


if __name__ == "__main__":
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.split(END)[1])
