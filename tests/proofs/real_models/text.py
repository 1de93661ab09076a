"""Chat templates render as transformers renders them, and SmolLM2's tokenizer gives its ids."""

from __future__ import annotations

import functools

import numpy as np

from jaxllm.hub import ModelSource, find_smollm2, open_source
from jaxllm.text import StreamDecoder
from tests.proofs.harness import proof
from tests.text.templates import PLAIN, TEMPLATES, compare, conversation
from tests.text.texts import texts

CONVERSATIONS = 20


def same_text(source: str, seed: int) -> None:
    """Twenty conversations, tools and refusals included, and a plain one, which every template renders."""
    drawn = [conversation(one) for one in range(seed, seed + CONVERSATIONS)]
    rendered, refused, differences = compare(source, [PLAIN, *drawn])
    assert not differences, "\n".join(differences)
    assert rendered + refused == 1 + CONVERSATIONS
    assert rendered > 0


@functools.cache
def smollm2() -> ModelSource:
    return open_source(find_smollm2())


def register(name: str) -> None:
    @proof("real_models", name=f"template_{name.replace('.', '_')}", count=20, sample=1)
    def template(seed: int) -> None:
        same_text(TEMPLATES[name], seed)


for _name in TEMPLATES:
    register(_name)


@proof("real_models", count=20, sample=1)
def template_of_smollm2(seed: int) -> None:
    """The template in the real file."""
    template = smollm2().template
    assert template is not None
    same_text(template.sources["default"], seed)


@proof("real_models", count=20, sample=1)
def smollm2_text(seed: int) -> None:
    """Every text is recovered from its ids, at once and streamed in chunks; no text becomes a special token."""
    tokenizer, rng = smollm2().tokenizer, np.random.default_rng(seed)
    for text in texts(seed, 50):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert not set(ids.tolist()) & set(tokenizer.special_names)
        decoder, pieces = StreamDecoder(tokenizer), []
        for part in np.array_split(ids, int(rng.integers(1, 8))):
            pieces.append(decoder.push(part))
            assert "\ufffd" not in pieces[-1]
        assert "".join(pieces) + decoder.flush() == text
