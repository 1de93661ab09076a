"""Chat templates: text equal to transformers', where they are found, and their limits."""

import json
import threading
import time

import pytest

from jaxllm.files import DataError
from jaxllm.text import ChatTemplate, TemplateError, load_template, template_from_gguf
from jaxllm.text.chat_template import template_limits
from tests.text import templates

HELLO = [{"role": "user", "content": "hi"}]


def render(source, **given):
    return ChatTemplate(source, "<s>", "</s>").render(HELLO, **given)


@pytest.mark.parametrize("name", templates.TEMPLATES)
def test_text_equals_transformers(name):
    rendered, refused, wrong = templates.compare(
        templates.TEMPLATES[name], [templates.conversation(seed) for seed in range(40)]
    )
    assert not wrong, "\n".join(wrong[:3])
    assert rendered >= 5
    assert (refused > 0) == (name in ("gemma", "mistral", "llama3.1"))


def test_what_the_comparison_covers():
    made = [templates.conversation(seed) for seed in range(40)]
    roles = {message["role"] for one in made for message in one["messages"]}
    assert roles == {"system", "user", "assistant", "tool"}
    assert {one["tools"] is None for one in made} == {True, False}
    assert any(len(one["messages"]) > 6 for one in made)
    contents = {message["content"] for one in made for message in one["messages"]}
    assert set(templates._TEXTS) <= contents


def test_the_models_own_refusal_is_told():
    with pytest.raises(TemplateError, match="refuses this conversation: System role not supported"):
        ChatTemplate(templates.TEMPLATES["gemma"]).render([{"role": "system", "content": "x"}])


ATTACKS = {
    "a loop": ("{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}", "not come to an end"),
    "small loops": ("{% for a in 'abcdefghij' %}" * 9 + "{% endfor %}" * 9, "not come to an end"),
    "a filtered loop": ("{% for i in range(99999) if false %}{% endfor %}" * 30, "not come to an end"),
    "a macro": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "calls itself without end"),
    "output": ("{% for i in range(99999) %}{{ 'xxxxxxxxxx' * 100 }}{% endfor %}", "writes more than"),
    "constant output": ("{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}", "writes more than"),
    "captured output": (
        "{% set ns = namespace(a='x' * 99) %}{% for i in range(99) %}"
        "{% set b %}{{ ns.a }}{{ ns.a }}{% endset %}{% set ns.a = b %}{% endfor %}",
        "writes more than",
    ),
    "repetition": ("{{ 'a' * 10 ** 9 }}", "would make a value"),
    "repetition of lists": ("{{ [1] * 10 ** 9 }}", "would make a value"),
    "a power": ("{{ 10 ** 99999 }}", "a number of"),
    "a product": (
        "{% set n = namespace(a=2 ** 9999) %}{% for i in range(99) %}{% set n.a = n.a * n.a %}{% endfor %}",
        "bits",
    ),
    "doubling text": (
        "{% set n = namespace(a='ab') %}{% for i in range(99) %}{% set n.a = n.a ~ n.a %}{% endfor %}",
        "makes too much",
    ),
    "doubling lists": (
        "{% set n = namespace(a=['ab']) %}{% for i in range(99) %}{% set n.a = [n.a, n.a] %}{% endfor %}{{ n.a }}",
        "makes too much",
    ),
    "padding": ("{{ 'a' | center(10 ** 9) }}", "width"),
    "padding by a method": ("{{ 'a'.rjust(10 ** 9) }}", "width"),
    "formatting": ("{{ '%999999999d' % 1 }}", "width"),
    "formatting by a filter": ("{{ '%*d' | format(999999999, 1) }}", "width"),
    "formatting by a method": ("{{ '{:>999999999}'.format(1) }}", "width"),
    "formatting bytes": ("{{ '%999999999d'.encode() % 1 }}", "width"),
    "a width from a field": ("{{ '{0:{1[a]}}'.format(1, {'a': 10 ** 9}) }}", "width of a field from another"),
    "indented JSON": (
        "{% set n = namespace(a=[]) %}{% for i in range(200) %}{% set n.a = [n.a] %}{% endfor %}"
        "{{ n.a | tojson(indent=9999) }}",
        "would make a value",
    ),
    "separated JSON": ("{{ range(9999) | list | tojson(separators=('a' * 9999, ':')) }}", "would make a value"),
    "wrapping": ("{{ ('a ' * 9999) | wordwrap(1, wrapstring='b' * 9999) }}", "would make a value"),
    "adding lists": ("{{ ([[1] * 99] * 9999) | sum(start=[]) }}", "would make a value"),
    "indenting": ("{{ ('a\n' * 9999) | indent(99999) }}", "would make a value"),
    "rounding": ("{{ 1.5 | round(999999999, 'ceil') }}", "width"),
    "replacing": ("{{ ('a' * 99999) | replace('a', 'b' * 99999) }}", "would make a value"),
    "replacing by a method": ("{{ ('a' * 99999).replace('a', 'b' * 99999) }}", "would make a value"),
    "joining": ("{{ range(99999) | join('b' * 99999) }}", "would make a value"),
    "many large values": ("{{ range(99999) | map('center', 99999) | list }}", "makes too much"),
    "a range": ("{{ range(10 ** 9) }}", "Range too big"),
    "filler text": ("{{ lipsum(9) }}", "'lipsum' is undefined"),
    "a class": ("{{ ''.__class__ }}", "reaches for '__class__' of a str"),
    "a class by filter": ("{{ messages | attr('__class__') }}", "reaches for '__class__' of a list"),
    "globals": ("{{ cycler.__init__.__globals__ }}", "reaches for '__init__'"),
    "a namespace's inside": ("{% set n = namespace(__class__=1) %}", "'__class__' in a namespace"),
    "a format's attribute": ("{{ '{0.__class__}'.format(1) }}", "reaches for '__class__'"),
    "the system": ("{{ os.system('ls') }}", "'os' is undefined"),
    "importing": ("{% import 'os' as os %}", "asks for another file"),
    "a file": ("{% include '/etc/passwd' %}", "asks for another file"),
    "a parent": ("{% extends '/etc/passwd' %}", "asks for another file"),
    "changing the messages": ("{{ messages.append(1) }}", "reaches for 'append' of a list"),
    "a division": ("{{ 1 / 0 }}", "ZeroDivisionError"),
    "no type": ("{{ 'a' + 1 }}", "TypeError"),
    "no syntax": ("a\n{% if %}", r"\(line 2\)"),
    "no filter": ("{{ 1 | nothing }}", "No filter named 'nothing'"),
    "a long source": ("x" * (template_limits.MAX_SOURCE + 1), "characters long"),
}


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("name", ATTACKS)
def test_what_a_template_may_not_do(name, monkeypatch):
    monkeypatch.setattr(template_limits, "MAX_STEPS", 60_000)  # the tests' type checks are slow
    source, message = ATTACKS[name]
    with pytest.raises(TemplateError, match=message):
        render(source)


def test_time_is_limited_off_the_main_thread_too(monkeypatch):
    monkeypatch.setattr(template_limits, "MAX_STEPS", 10**12)
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.2)
    caught = []

    def work():
        try:
            render(ATTACKS["a loop"][0])
        except TemplateError as error:
            caught.append(str(error))

    thread = threading.Thread(target=work)
    start = time.monotonic()
    thread.start()
    thread.join(timeout=30)
    assert caught == ["chat template: the template cannot be used: it runs for more than 0.2 s"]
    assert time.monotonic() - start < 10


@pytest.mark.drawn(0.3)
def test_a_long_conversation_is_within_the_limits():
    """200,000 words over 2,000 messages."""
    turn = [{"role": "user", "content": "word " * 100}, {"role": "assistant", "content": "word " * 100}]
    for name in ("qwen3", "llama3.1", "mistral"):
        text = ChatTemplate(templates.TEMPLATES[name], "<s>", "</s>").render(turn * 1000)
        assert text.count("word") == 200_000


def test_renderings_do_not_share_their_limits(monkeypatch):
    monkeypatch.setattr(template_limits, "MAX_STEPS", 2000)
    template = ChatTemplate("{% for i in range(900) %}{{ i }}{% endfor %}")
    assert len({template.render(HELLO) for _ in range(5)}) == 1


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"content": "x"}], "message 1 is no mapping with a 'role'"),
        ([*HELLO, {}], "message 2 is no mapping with a 'role'"),
        ([{"role": "user", "content": object()}], "made of JSON's types; this has a object"),
    ],
)
def test_conversations_that_are_none(messages, message):
    with pytest.raises(TemplateError, match=message):
        ChatTemplate("x").render(messages)


def test_messages_stay_as_they_are():
    given = [{"role": "assistant", "content": "x", "reasoning": "y"}]
    ChatTemplate("{{ messages[0].thinking }}").render(given)
    assert given == [{"role": "assistant", "content": "x", "reasoning": "y"}]


def write(folder, files):
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.mark.parametrize(
    ("files", "plain", "tools"),
    [
        ({"tokenizer_config.json": {"chat_template": "one", "bos_token": "<s>"}}, "one", "one"),
        ({"chat_template.jinja": "two"}, "two", "two"),
        ({"chat_template.json": {"chat_template": "three"}}, "three", "three"),
        ({"tokenizer_config.json": {"chat_template": "one"}, "chat_template.jinja": "two"}, "two", "two"),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [
                        {"name": "default", "template": "four{{ bos_token }}{{ eos_token }}"},
                        {"name": "tool_use", "template": "five"},
                    ],
                    "bos_token": {"content": "<s>"},
                    "eos_token": None,
                }
            },
            "four<s>",
            "five",
        ),
        ({"chat_template.jinja": "six", "additional_chat_templates/tool_use.jinja": "seven"}, "six", "seven"),
    ],
)
def test_where_templates_are_found_and_saved(files, plain, tools, tmp_path):
    write(tmp_path, files)
    template = load_template(tmp_path)
    assert template is not None
    assert template.render(HELLO) == plain
    assert template.render(HELLO, tools=[{"type": "function"}]) == tools
    template.save(tmp_path / "saved")
    write(tmp_path / "saved", {"tokenizer_config.json": {"bos_token": "<s>"}})
    again = load_template(tmp_path / "saved")
    assert again is not None
    assert (again.render(HELLO), again.render(HELLO, tools=[])) == (plain, tools)


def test_one_file_and_none(tmp_path):
    assert load_template(tmp_path) is None
    write(tmp_path, {"mine.jinja": "mine {{ messages[0].content }}"})
    template = load_template(tmp_path / "mine.jinja")
    assert template is not None
    assert template.render(HELLO) == "mine hi"
    with pytest.raises(TemplateError, match="no such file"):
        load_template(tmp_path / "gone.jinja")
    write(tmp_path, {"tokenizer_config.json": "{"})
    with pytest.raises(DataError, match="not valid JSON"):
        load_template(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", [1], r"tokenizer_config.json: a list at the top"),
        ("chat_template.json", "[]", r"chat_template.json: a list at the top"),
        ("tokenizer_config.json", {"chat_template": [{"x": 1}]}, "chat_template is invalid; legal"),
        ("tokenizer_config.json", {"chat_template": [1]}, "chat_template is invalid; legal"),
        ("tokenizer_config.json", {"chat_template": [{"name": 1, "template": "x"}]}, "chat_template is invalid"),
        ("tokenizer_config.json", {"chat_template": {"default": 1}}, "chat_template is invalid; legal"),
        ("chat_template.json", {"chat_template": 7}, "chat_template.json: chat_template is invalid; legal"),
        ("tokenizer_config.json", {"chat_template": "x", "bos_token": [1]}, r"\[1\] is not a token"),
    ],
)
def test_files_that_hold_no_template_are_refused(name, content, message, tmp_path):
    write(tmp_path, {name: content})
    with pytest.raises(DataError, match=message):
        load_template(tmp_path)


def test_a_template_in_a_gguf_is_text():
    with pytest.raises(TemplateError, match=r"tokenizer.chat_template is a list; a template is text"):
        template_from_gguf({"tokenizer.chat_template": ["x"]})
