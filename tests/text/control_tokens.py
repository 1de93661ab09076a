"""Strings with names of control tokens, and what transformers makes of them; shared by tests and proofs."""

from __future__ import annotations

import functools
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from jaxllm.text import ChatTemplate, Tokenizer, load_tokenizer
from tests.text.test_library import ENDS, definition
from tests.text.texts import texts

MARKS = {
    "smollm2": ("<|im_start|>", "<|im_end|>"),
    "qwen2": ("<|im_end|>", "<|endoftext|>"),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>"),
    "gemma": ("<s>", "<end_of_turn>"),
}
"""Control tokens that begin and end a turn in the template of each tokenizer."""
NAMES = sorted({name for pair in MARKS.values() for name in pair} | {"<tool_call>", "<think>", "<b>", "</s>"})
TURN = "{{ begin }}{{ m.role }}\n{{ m.content }}{{ end }}\n"


@functools.cache
def tokenizer(name: str) -> tuple[Tokenizer, Any]:
    """(ours, that of transformers) of one file."""
    from transformers import PreTrainedTokenizerFast

    folder = Path(tempfile.mkdtemp())
    if name == "smollm2":
        from jaxllm.hub import find_smollm2, open_source

        open_source(find_smollm2()).tokenizer.save(folder)
        bos, eos = "<|im_start|>", "<|im_end|>"
    else:
        bos, eos = ENDS[name]
        (folder / "tokenizer.json").write_text(definition(name), "utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": bos, "eos_token": eos}))
    reference = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token=bos, eos_token=eos, clean_up_tokenization_spaces=False
    )
    return load_tokenizer(folder), reference


def strings(seed: int, count: int) -> list[str]:
    """Texts, three quarters of which have names of control tokens, whole and in pieces."""
    rng = random.Random(seed)
    out = []
    for number, text in enumerate(texts(seed, count)):
        parts = [text]
        for _ in range(number % 4):
            name = rng.choice(NAMES)
            cut = rng.choice([len(name), len(name), rng.randrange(1, len(name))])
            parts += [name[:cut], rng.choice(["", " ", "\n", "x", name[cut:]]), text[: rng.randrange(5)]]
        out.append("".join(parts))
    return out


def template(name: str) -> ChatTemplate:
    """Template that writes turns between the control tokens of a tokenizer."""
    begin, end = MARKS[name]
    turn = TURN.replace("{{ begin }}", begin).replace("{{ end }}", end)
    return ChatTemplate("{% for m in messages %}" + turn + "{% endfor %}" + begin + "{{ 'assistant\\n' }}")


def plain_ids(reference: Any, text: str) -> list[int]:
    """What transformers makes of a text none of which is a special token."""
    return reference.encode(text, add_special_tokens=False, split_special_tokens=True)


def chat_ids(name: str, contents: list[str]) -> list[int]:
    """What transformers makes of a conversation, segment by segment: control tokens are those of the template alone."""
    _, reference = tokenizer(name)
    begin, end = (reference.convert_tokens_to_ids(one) for one in MARKS[name])
    out: list[int] = []
    lead = ""
    for number, content in enumerate(contents):
        role = ("user", "assistant")[number % 2]
        if lead:
            out += plain_ids(reference, lead)
        out += [begin, *plain_ids(reference, f"{role}\n{content}"), end]
        lead = "\n"
    return [*out, *plain_ids(reference, lead), begin, *plain_ids(reference, "assistant\n")]


def messages(contents: list[str]) -> list[dict[str, Any]]:
    """A conversation of these contents."""
    return [{"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(contents)]


def check(name: str, text: str) -> None:
    """Raw and as content of a chat, with and without parsing: the ids are those of transformers."""
    ours, reference = tokenizer(name)
    assert ours.encode(text, specials=True).tolist() == reference.encode(text, add_special_tokens=False), text
    assert ours.encode(text).tolist() == plain_ids(reference, text), text
    rendered, ids = template(name).encode(ours, messages([text]))
    assert ids == chat_ids(name, [text]), text
    whole = reference.apply_chat_template(
        messages([text]), chat_template=template(name).sources["default"], tokenize=False
    )
    assert rendered == whole
    _, parsed = template(name).encode(ours, messages([text]), parse_special=True)
    assert parsed == reference.encode(whole, add_special_tokens=False), text
