"""What prompts and conversations mean: special tokens, truncation, messages to continue, token ids, scores."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from jaxllm.infer.chat_session import Chat
from jaxllm.infer.llm import LLM, encode_prompt
from jaxllm.serve.api import request_schemas
from jaxllm.serve.api.errors import ApiError
from jaxllm.text import ChatTemplate
from jaxllm.text.byte_tokenizer import ByteTokenizer
from tests.serve import servers
from tests.serve.test_fields import asked
from tests.serve.test_tools import asked as asked_with
from tests.text.templates import TEMPLATES, reference

CHAT, TEXT = request_schemas.ChatRequest, request_schemas.CompletionRequest
FILL = "<|reserved_0|>def f():<|reserved_1|>"
HI = {"role": "user", "content": "hi"}


def prompt(model: Any, **fields: Any) -> list[int]:
    return asked(model, **fields).jobs[0].prompt


def test_prompts_name_special_tokens():
    parsed, plain = [258, *b"def f():", 259], [*FILL.encode()]
    assert prompt(TEXT, prompt=FILL) == prompt(TEXT, prompt=[FILL]) == [256, *parsed]
    assert prompt(TEXT, prompt=FILL, add_special_tokens=False) == parsed
    assert prompt(TEXT, prompt=FILL, parse_special=False) == [256, *plain]
    assert prompt(TEXT, prompt=FILL, parse_special=False, add_special_tokens=False) == plain
    assert prompt(TEXT, prompt="") == [256]
    with pytest.raises(ApiError, match="prompt is empty, and none is added"):
        prompt(TEXT, prompt="", add_special_tokens=False)
    llm = LLM.__new__(LLM)
    llm.tokenizer = ByteTokenizer()
    assert llm.ids(FILL) == encode_prompt(llm.tokenizer, FILL) == [256, *parsed]
    assert llm.ids(FILL, parse_special=False, add_special_tokens=False) == plain


def test_messages_do_not():
    messages = [{"role": "user", "content": FILL}]
    text = f"<user>{FILL}\n<assistant>".encode()
    assert prompt(CHAT, messages=messages) == list(text)
    parsed = [*b"<user>", 258, *b"def f():", 259, *b"\n<assistant>"]
    assert prompt(CHAT, messages=messages, parse_special=True) == parsed
    assert prompt(CHAT, messages=messages, add_special_tokens=True) == [256, *text]
    parts = [{"type": "text", "text": "<|reser"}, {"type": "text", "text": "ved_0|>"}]
    assert 258 not in prompt(CHAT, messages=[{"role": "user", "content": parts}])
    session = Chat.__new__(Chat)
    session.loaded = type("Loaded", (), {"tokenizer": ByteTokenizer(), "template": servers.TEMPLATE})()
    assert session.tokens(messages) == list(text)


def test_tools_and_calls_do_not():
    """Neither what a request says of its functions, nor the calls of earlier turns, where a template has no words."""
    bare = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}")
    function = {"name": "f", "description": "<|eos|>", "parameters": {"type": "object", "properties": {"<|bos|>": {}}}}
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a": "<|eos|>"}'}}
    messages = [
        HI,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "<|eos|>"},
    ]
    for template, parser in ((bare, "hermes"), (servers.TEMPLATE, None)):
        job = asked_with(template, parser, messages=messages, tools=[{"type": "function", "function": function}]).jobs[
            0
        ]
        assert max(job.prompt) < 256
        assert b"<|eos|>" in bytes(job.prompt)


@pytest.mark.parametrize(("most", "text", "want"), [
    (3, "abcdef", [256, *b"ef"]), (3, [1, 2, 3, 4], [2, 3, 4]), (9, "abc", [256, *b"abc"]), (1, "abc", [256]),
])  # fmt: skip
def test_the_last_tokens_are_kept(most, text, want):
    assert prompt(TEXT, prompt=text, truncate_prompt_tokens=most) == want


def test_the_first_tokens_are_kept():
    body = {"prompt": "abcdef", "truncate_prompt_tokens": 3}
    assert prompt(TEXT, **body, truncation_side="right") == [256, *b"ab"]
    assert prompt(TEXT, **body, truncation_side="left") == prompt(TEXT, **body) == [256, *b"ef"]
    with pytest.raises(ApiError, match="needs truncate_prompt_tokens"):
        prompt(TEXT, prompt="a", truncation_side="left")


def test_as_many_tokens_are_kept_as_fit():
    room = servers.FixedRate().max_len
    long = prompt(TEXT, prompt="a" * 5000, truncate_prompt_tokens=-1, max_tokens=10)
    assert (len(long), long[0]) == (room - 10, 256)
    chat = asked(CHAT, messages=[{"role": "user", "content": "a" * 5000}], truncate_prompt_tokens=-1, max_tokens=7)
    assert (len(chat.jobs[0].prompt), chat.jobs[0].params.max_tokens) == (room - 7, 7)
    with pytest.raises(ApiError, match="truncate_prompt_tokens = -1 keeps"):
        prompt(TEXT, prompt="a" * 5000)


@pytest.mark.parametrize("name", ["smollm2", "llama3.1", "qwen3", "gemma"])
@pytest.mark.parametrize("content", ["The capital is", "The capital is ", "  The ", "a", "x <|im_end|> y\n"])
def test_a_message_is_continued_as_transformers_continues_it(name, content):
    messages = [HI, {"role": "assistant", "content": content}]
    job = asked_with(ChatTemplate(TEMPLATES[name]), messages=messages, continue_final_message=True).jobs[0]
    bare = reference(TEMPLATES[name])(messages, continue_final_message=True)
    assert bytes(job.prompt).decode() == bare.replace("<s>", "")


def test_messages_that_cannot_be_continued():
    with pytest.raises(ApiError) as caught:
        asked(CHAT, continue_final_message=True, add_generation_prompt=True)
    assert caught.value.param == "continue_final_message"
    silent = ChatTemplate("{% for m in messages %}<{{ m.role }}>{% endfor %}")
    with pytest.raises(ApiError, match="cannot be continued"):
        asked_with(silent, continue_final_message=True)


def test_the_effort_of_reasoning_reaches_the_template():
    told = "{% for m in messages %}{{ m.content }}{% endfor %}"
    knows = ChatTemplate(told + "[{{ reasoning_effort }}]")
    assert bytes(asked_with(knows, reasoning_effort="high").jobs[0].prompt) == b"hi[high]"
    switch = ChatTemplate(told + "{{ '[on]' if enable_thinking else '[off]' }}")
    for effort, want in (("none", b"hi[off]"), ("minimal", b"hi[off]"), ("low", b"hi[on]")):
        assert bytes(asked_with(switch, reasoning_effort=effort).jobs[0].prompt) == want
    given = {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "own"}}
    assert bytes(asked_with(knows, **given).jobs[0].prompt) == b"hi[own]"
    assert bytes(asked_with(ChatTemplate(told), reasoning_effort="low").jobs[0].prompt) == b"hi"


# Over a tiny model


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with servers.running(servers.tiny_backend) as (_, url), httpx.Client(base_url=url, timeout=60) as made:
        yield made


def post(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = client.post(path, json={"model": "tiny", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def lines(client: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    with client.stream("POST", path, json={"model": "tiny", "stream": True, **body}) as stream:
        found = [line[6:] for line in stream.iter_lines() if line]
    assert found.pop() == "[DONE]"
    return [json.loads(line) for line in found]


ASKED = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}


def test_token_ids_are_returned_whole_and_streamed(client):
    text = {**ASKED, "prompt": ["ab", "c"], "return_token_ids": True}
    whole = post(client, "/v1/completions", **text)["choices"]
    assert [one["prompt_token_ids"] for one in whole] == [[256, *b"ab"], [256, *b"c"]]
    assert [len(one["token_ids"]) for one in whole] == [5, 5]
    streamed: list[list[int]] = [[], []]
    firsts: list[Any] = [[], []]
    for chunk in lines(client, "/v1/completions", **text):
        (choice,) = chunk["choices"]
        firsts[choice["index"]] += [choice.get("prompt_token_ids")]
        streamed[choice["index"]] += choice["token_ids"]
    assert streamed == [one["token_ids"] for one in whole]
    assert [one[0] for one in firsts] == [[256, *b"ab"], [256, *b"c"]]
    assert not any(later for one in firsts for later in one[1:])
    chat = {**ASKED, "messages": [HI], "return_token_ids": True}
    answer = post(client, "/v1/chat/completions", **chat)
    assert answer["prompt_token_ids"] == list(b"<user>hi\n<assistant>")
    chunks = lines(client, "/v1/chat/completions", **chat)
    assert chunks[0]["prompt_token_ids"] == answer["prompt_token_ids"]
    assert [i for one in chunks for i in one["choices"][0].get("token_ids", [])] == answer["choices"][0]["token_ids"]
    bare = post(client, "/v1/completions", **ASKED, prompt="a")
    assert "token_ids" not in bare["choices"][0]


def test_the_prompts_log_probabilities(client):
    asked = {**ASKED, "prompt": "abcabc", "return_token_ids": True}
    choice = post(client, "/v1/completions", **asked, prompt_logprobs=2)["choices"][0]
    rows, ids = choice["prompt_logprobs"], choice["prompt_token_ids"]
    assert len(rows) == len(ids) == 7
    assert rows[0] is None
    echoed = post(client, "/v1/completions", **asked, echo=True, logprobs=2)["choices"][0]["logprobs"]
    for token, row, value in zip(ids[1:], rows[1:], echoed["token_logprobs"][1:], strict=False):
        own = row[str(token)]
        assert np.isclose(own["logprob"], value, atol=1e-4)
        assert own["decoded_token"] == chr(token)
        assert 2 <= len(row) <= 3
        best = sorted(row.values(), key=lambda one: one["rank"])
        assert [one["rank"] for one in best[:2]] == [1, 2]
        assert best == sorted(best, key=lambda one: -one["logprob"])
    only = post(client, "/v1/completions", prompt="abcabc", max_tokens=0, prompt_logprobs=0)["choices"][0]
    assert [len(row) for row in only["prompt_logprobs"][1:]] == [1] * 6
    assert only["text"] == ""
    chat = post(client, "/v1/chat/completions", **ASKED, messages=[HI], prompt_logprobs=1)
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    for path, given in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": [HI]})):
        body = {"model": "tiny", **given, "stream": True, "prompt_logprobs": 1}
        assert client.post(path, json=body).json()["error"]["param"] == "prompt_logprobs"


def test_logprobs_0_lists_the_token_itself(client):
    scores = post(client, "/v1/completions", **ASKED, prompt="ab", logprobs=0)["choices"][0]["logprobs"]
    assert [len(row) for row in scores["top_logprobs"]] == [1] * 5
    pairs = zip(scores["tokens"], scores["token_logprobs"], strict=True)
    assert [dict([pair]) for pair in pairs] == scores["top_logprobs"]
    unlikely = post(client, "/v1/completions", prompt="ab", max_tokens=3, logprobs=1, logit_bias={"120": 100})
    for token, row in zip(
        *(unlikely["choices"][0]["logprobs"][name] for name in ("tokens", "top_logprobs")), strict=True
    ):
        assert token in row


def test_usage_in_every_chunk_and_of_the_cache(client):
    prompt = "a prompt that is longer than a page of the cache"
    body = {**ASKED, "prompt": prompt, "cache_salt": "usage"}
    first, again = (post(client, "/v1/completions", **body)["usage"] for _ in range(2))
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    assert again["prompt_tokens_details"]["cached_tokens"] == len(prompt) // 8 * 8
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path, given in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": [HI]})):
        chunks = lines(client, path, **ASKED, **given, stream_options=options)
        made = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert made == sorted(made)
        assert (made[-1], chunks[-1]["choices"]) == (5, [])
        alone = lines(client, path, **ASKED, **given, stream_options={"continuous_usage_stats": True})
        assert all(chunk["choices"] and chunk["usage"] for chunk in alone)


def test_special_tokens_in_the_text(client):
    for skip, want in ((None, ""), (True, ""), (False, "<|reserved_3|>" * 3)):
        body = {
            "prompt": "a",
            "max_tokens": 3,
            "logit_bias": {"261": 100},
            "temperature": 0,
            "skip_special_tokens": skip,
        }
        assert post(client, "/v1/completions", **body)["choices"][0]["text"] == want
        del body["prompt"]
        said = post(client, "/v1/chat/completions", **body, messages=[HI])["choices"][0]["message"]["content"]
        assert said == want
    echo = post(client, "/v1/completions", prompt=FILL, max_tokens=2, echo=True, logprobs=0)["choices"][0]
    assert echo["text"].startswith(FILL)
    scores = echo["logprobs"]
    assert scores["tokens"][:2] == ["<|bos|>", "<|reserved_0|>"]
    assert scores["text_offset"][:4] == [0, 0, 14, 15]


def test_tokenize(client):
    def ids(**body: Any) -> list[int]:
        return post(client, "/tokenize", **body)["tokens"]

    assert ids(prompt=FILL) == prompt(TEXT, prompt=FILL)
    assert ids(prompt=FILL, parse_special=False, add_special_tokens=False) == list(FILL.encode())
    messages = [{"role": "user", "content": FILL}]
    assert ids(messages=messages) == prompt(CHAT, messages=messages)
    assert ids(messages=messages, parse_special=True) == prompt(CHAT, messages=messages, parse_special=True)
    assert ids(messages=messages, add_special_tokens=True)[0] == 256
    assert ids(messages=messages, continue_final_message=True) == list(f"<user>{FILL}".encode())
    tool = {"type": "function", "function": {"name": "f"}}
    assert bytes(ids(messages=[HI], tools=[tool])).startswith(b"<tools>f ")
    assert post(client, "/tokenize", prompt="a<|eos|>", return_token_strs=True)["token_strs"] == [
        "<|bos|>",
        "a",
        "<|eos|>",
    ]
    wrong = client.post("/tokenize", json={"prompt": "a", "tools": [tool]})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tools")
