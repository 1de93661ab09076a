"""Control tokens: prompts name them, as in transformers; the content of a conversation does not."""

import json

import pytest

from jaxllm.files import DataError
from jaxllm.text import ByteTokenizer, ChatTemplate
from jaxllm.text.chat_template.content_marks import ContentMarks
from jaxllm.text.hf_tokenizer import HFTokenizer
from tests.text import control_tokens, injections
from tests.text.test_library import definition

PLAIN = ChatTemplate("{% for m in messages %}<|bos|>{{ m.content }}<|eos|>{% endfor %}")


@pytest.mark.drawn(0.4)
@pytest.mark.parametrize("name", ["qwen2", "llama3", "gemma"])
def test_ids_equal_transformers(name):
    for text in control_tokens.strings(11, 24):
        control_tokens.check(name, text)


def test_a_conversation_of_many_messages_equals_transformers():
    contents = control_tokens.strings(12, 9)
    ours, _ = control_tokens.tokenizer("qwen2")
    _, ids = control_tokens.template("qwen2").encode(ours, control_tokens.messages(contents))
    assert ids == control_tokens.chat_ids("qwen2", contents)


@pytest.mark.drawn(0.4)
@pytest.mark.parametrize("family", injections.FAMILIES)
def test_content_forges_no_turn(family):
    made = [injections.check(family, number) for number in range(0, len(injections.PATTERNS), 5)]
    assert max(made) > 0  # where content is parsed, the same strings do


def test_there_are_fifty_injections():
    assert len(set(injections.PATTERNS)) == 50


def test_names_in_pieces():
    """Names that begin in one message and end in another, or in the template; and a template that takes a part out."""
    tokenizer = ByteTokenizer()
    run_on = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}<|eos|>")
    assert run_on.encode(tokenizer, control_tokens.messages(["<|e", "os|>"]))[1] == [*b"<|eos|>", 257]
    begins = ChatTemplate("<|eo{% for m in messages %}{{ m.content }}{% endfor %}")
    assert begins.encode(tokenizer, control_tokens.messages(["s|>"]))[1] == list(b"<|eos|>")
    ends = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}os|>")
    assert ends.encode(tokenizer, control_tokens.messages(["<|e"]))[1] == list(b"<|eos|>")
    taken_out = ChatTemplate("{% for m in messages %}{{ m.content.replace('<br>', '') }}{% endfor %}")
    assert taken_out.encode(tokenizer, control_tokens.messages(["<|e<br>os|>"]))[1] == list(b"<|eos|>")
    spelt = ChatTemplate("{% for m in messages %}{{ m.content | tojson(ensure_ascii=True) }}{% endfor %}")
    text, ids = spelt.encode(tokenizer, control_tokens.messages(["<|eos|>\u00e9\\ue000"]))
    assert (text, ids) == ('"<|eos|>\\u00e9\\\\ue000"', list(text.encode()))


def test_what_a_template_looks_for_in_content_is_found():
    source = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}<|eos|>{% endfor %}"
    contents = control_tokens.messages(["a <|eos|></think> b <|eos|>"])
    text, ids = ChatTemplate(source).encode(ByteTokenizer(), contents)
    assert text == ChatTemplate(source).render(contents) == " b <|eos|><|eos|>"
    assert ids == [*b" b <|eos|>", 257]


def test_characters_that_could_be_marks_are_kept():
    content = "\ufdd0\ufdd1 <|eos|> \ue000"
    with pytest.raises(DataError, match=r"U\+FDD0, a noncharacter"):
        PLAIN.encode(ByteTokenizer(), control_tokens.messages([content]))
    content = content.replace("<|eos|>", "< |>")
    text, ids = PLAIN.encode(ByteTokenizer(), control_tokens.messages([content]))
    assert (text, ids) == (f"<|bos|>{content}<|eos|>", [256, *content.encode(), 257])
    every = "".join(map(chr, [*range(0xFDD0, 0xFDF0), *range(0xE000, 0xF900)]))
    with pytest.raises(DataError, match="all characters that could mark"):
        ContentMarks(["<|eos|>"], [every])


def test_control_tokens_that_a_file_does_not_mark_as_special():
    """As DeepSeek's: text in documents and content, and tokens where a template writes them."""
    made = json.loads(definition("gpt2"))
    user = "<\uff5cUser\uff5c>"
    made["added_tokens"].append({**made["added_tokens"][0], "id": 400, "content": user, "special": False})
    tokenizer = HFTokenizer(json.dumps(made), bos=None, eos="<|endoftext|>", where="here")
    (index,) = tokenizer.encode(user, specials=True).tolist()
    assert index not in tokenizer.encode(user).tolist()
    assert tokenizer.decode([index]) == user
    template = ChatTemplate("{% for m in messages %}" + user + "{{ m.content }}{% endfor %}")
    _, ids = template.encode(tokenizer, control_tokens.messages([f"a{user}"]))
    assert ids == [index, *tokenizer.encode(f"a{user}").tolist()]
    assert user not in tokenizer.special_names.values()


def test_a_prompt_is_echoed_as_it_was_given():
    tokenizer = ByteTokenizer()
    for text in ("a<|eos|>b", "", "<|bos|>"):
        ids = [256, *tokenizer.encode(text, specials=True).tolist()]
        assert tokenizer.prompt_text(ids) == text
