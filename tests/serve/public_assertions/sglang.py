"""Assertions of SGLang's tests under ``test/srt/openai_server``."""

from __future__ import annotations

import json
import re

from tests.serve.public_assertions.assertions import CHAT, HI, TEXT, Asker, asserts, refuses

SERVER = "basic/test_openai_server.py"
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {
        "type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]
    }}}
    for name in ("add", "sub")
]  # fmt: skip


@asserts("sglang", SERVER)
def every_mix_of_echo_logprobs_and_lists(ask: Asker) -> None:
    for echo in (False, True):
        for logprobs in (None, 5):
            for prompt in ("abc", ["abc", "abc"], [97, 98], [[97, 98], [97, 98]]):
                found = ask.text(prompt=prompt, echo=echo, logprobs=logprobs, n=2, max_tokens=2)
                lists = isinstance(prompt, list) and not isinstance(prompt[0], int)
                assert len(found["choices"]) == 2 * (2 if lists else 1)
                assert (found["choices"][0]["logprobs"] is None) == (logprobs is None)
                if echo:
                    assert found["choices"][0]["text"].startswith("ab")


@asserts("sglang", SERVER)
def streams_of_every_index_begin_and_end(ask: Asker) -> None:
    chunks = ask.stream(TEXT, prompt=["abc", "abd"], n=2, logprobs=5, stream_options={"include_usage": True})
    last = chunks.pop()
    assert last["usage"]["completion_tokens"] == 4 * 5
    ends = [chunk["choices"][0]["index"] for chunk in chunks if chunk["choices"][0]["finish_reason"]]
    assert sorted(ends) == [0, 1, 2, 3]


@asserts("sglang", SERVER)
def chats_of_several_choices(ask: Asker) -> None:
    found = ask.chat(n=2, logprobs=True, top_logprobs=5)
    assert [len(one["logprobs"]["content"][0]["top_logprobs"]) for one in found["choices"]] == [5, 5]
    assert found["id"]
    assert found["created"]


@asserts("sglang", SERVER)
def each_choice_of_a_chat_stream_ends_once(ask: Asker) -> None:
    chunks = ask.stream(CHAT, n=2, stream_options={"include_usage": True})
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert sorted(one["index"] for one in choices if one["finish_reason"]) == [0, 1]
    assert [one["delta"]["role"] for one in choices[:2]] == ["assistant", "assistant"]


@asserts("sglang", SERVER, "SGLang's field is `regex`; here it is vLLM's structured_outputs.regex or guided_regex.")
def a_regular_expression_is_held_to(ask: Asker) -> None:
    text = ask.said(guided_regex=r'\{"population": [0-9]{2}\}', max_tokens=40, ignore_eos=False)
    assert re.fullmatch(r'\{"population": [0-9]{2}\}', text)
    assert ask.refused(CHAT, regex="a")["param"] == "regex"


@asserts("sglang", SERVER)
def penalties_are_taken(ask: Asker) -> None:
    assert isinstance(ask.said(frequency_penalty=1.0, presence_penalty=0.5), str)


@asserts("sglang", SERVER)
def an_answer_continues_a_prefill(ask: Asker) -> None:
    messages = [*HI, {"role": "assistant", "content": "{\n"}]
    found = ask.chat(messages=messages, continue_final_message=True, return_token_ids=True)
    assert bytes(found["prompt_token_ids"]).endswith(b"<assistant>{\n")


@asserts("sglang", SERVER)
def models_are_listed_and_retrieved(ask: Asker) -> None:
    (model,) = ask.client.get("/v1/models").json()["data"]
    assert isinstance(model["max_model_len"], int)
    assert ask.client.get("/v1/models/tiny").json() == model


@asserts("sglang", SERVER)
def a_model_that_is_not_there_is_a_404(ask: Asker) -> None:
    answer = ask.client.get("/v1/models/other")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


@asserts("sglang", "basic/test_openai_embedding.py")
def embeddings_of_one_and_several(ask: Asker) -> None:
    one = ask.get("/v1/embeddings", model="tiny", input="Hello world")["data"]
    many = ask.get("/v1/embeddings", model="tiny", input=["Hello world", "Test text"])["data"]
    assert (len(one), len(many)) == (1, 2)
    assert all(abs(a - b) < 1e-5 for a, b in zip(one[0]["embedding"], many[0]["embedding"], strict=True))


@asserts("sglang", "basic/test_openai_embedding.py")
def embeddings_of_token_ids(ask: Asker) -> None:
    assert ask.get("/v1/embeddings", model="tiny", input=[104, 105])["usage"]["prompt_tokens"] == 2


@asserts("sglang", "basic/test_openai_embedding.py", "An empty text is the token that begins a document, and has one.")
def an_embedding_of_nothing(ask: Asker) -> None:
    assert ask.get("/v1/embeddings", model="tiny", input="")["usage"]["prompt_tokens"] == 1
    assert ask.refused("/v1/embeddings", model="tiny", input=[])["param"] == "input"


@asserts("sglang", "features/test_cache_report.py")
def cached_tokens_are_reported(ask: Asker) -> None:
    prompt = "A long prompt, of which all whole pages are found again."
    first, again = (ask.text(prompt=prompt, cache_salt="report")["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert 0 < again["prompt_tokens_details"]["cached_tokens"] < again["prompt_tokens"]


@asserts("sglang", "features/test_continuous_usage_stats.py")
def counts_grow_in_a_chat_stream(ask: Asker) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    made = [chunk["usage"]["completion_tokens"] for chunk in ask.stream(CHAT, stream_options=options)]
    assert made == sorted(made)
    assert made[-1] == 5


@asserts("sglang", "features/test_enable_thinking.py")
def template_variables_are_passed_on(ask: Asker) -> None:
    assert ask.chat(chat_template_kwargs={"enable_thinking": False})["choices"]


@asserts("sglang", "features/test_json_mode.py")
def json_mode_gives_json(ask: Asker) -> None:
    for stream in (False, True):
        body = {"response_format": {"type": "json_object"}, "max_tokens": 60, "ignore_eos": False, "seed": 5}
        if stream:
            parts = [one["choices"][0] for one in ask.stream(CHAT, **body)]
            text, finish = "".join(one["delta"].get("content") or "" for one in parts), parts[-1]["finish_reason"]
        else:
            choice = ask.chat(**body)["choices"][0]
            text, finish = choice["message"]["content"], choice["finish_reason"]
        assert text.startswith("{")
        assert finish == "length" or isinstance(json.loads(text), dict)


@asserts("sglang", "features/test_openai_server_ebnf.py")
def an_ebnf_grammar_is_held_to(ask: Asker) -> None:
    grammar = 'root ::= "Hello" | "Hi" | "Hey"'
    for fields in ({"structured_outputs": {"grammar": grammar}}, {"guided_grammar": grammar}):
        assert ask.said(**fields, max_tokens=20, ignore_eos=False) in ("Hello", "Hi", "Hey")


@asserts("sglang", "function_call/test_tool_choice.py")
def a_required_tool_is_called(ask: Asker) -> None:
    choice = ask.chat(tools=TOOLS, tool_choice="required", max_tokens=100, ignore_eos=False, parallel_tool_calls=False)[
        "choices"
    ][0]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] in ("add", "sub")
    assert isinstance(json.loads(call["function"]["arguments"])["a"], bool)


@asserts("sglang", "function_call/test_tool_choice.py")
def a_named_tool_is_called(ask: Asker) -> None:
    named = {"type": "function", "function": {"name": "sub"}}
    message = ask.chat(tools=TOOLS, tool_choice=named, max_tokens=100, ignore_eos=False)["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["sub"]


@asserts("sglang", "function_call/test_tool_choice.py")
def an_unknown_tool_is_refused(ask: Asker) -> None:
    named = {"type": "function", "function": {"name": "nowhere"}}
    assert ask.refused(CHAT, tools=TOOLS, tool_choice=named)["param"] == "tool_choice"
    assert ask.refused(CHAT, tool_choice="required")["param"] == "tool_choice"


@asserts("sglang", "function_call/test_openai_function_calling.py")
def streamed_arguments_are_json(ask: Asker) -> None:
    body = {
        "tools": TOOLS,
        "tool_choice": "required",
        "max_tokens": 100,
        "ignore_eos": False,
        "parallel_tool_calls": False,
    }
    parts = [call for one in ask.stream(CHAT, **body) for call in one["choices"][0]["delta"].get("tool_calls", ())]
    assert [part["function"]["name"] for part in parts if "name" in part["function"]]
    assert set(json.loads("".join(part["function"].get("arguments", "") for part in parts))) == {"a"}


@asserts(
    "sglang", "validation/test_matched_stop.py", "The string that ended a text is in no field of chat completions."
)
def a_stop_string_ends_the_text(ask: Asker) -> None:
    whole = ask.text(max_tokens=8)["choices"][0]["text"]
    cut = ask.text(max_tokens=8, stop=[whole[3:5]])["choices"][0]
    assert (cut["text"], cut["finish_reason"]) == (whole[: whole.index(whole[3:5])], "stop")
    assert "matched_stop" not in cut


@asserts("sglang", "validation/test_openai_server_ignore_eos.py")
def the_end_of_text_is_ignored(ask: Asker) -> None:
    bias = {"257": 100}
    assert ask.text(max_tokens=4, ignore_eos=False, logit_bias=bias)["usage"]["completion_tokens"] == 1
    assert ask.text(max_tokens=4, ignore_eos=True, logit_bias=bias)["usage"]["completion_tokens"] == 4


@asserts("sglang", "validation/test_request_length_validation.py")
def a_prompt_that_is_too_long_is_refused(ask: Asker) -> None:
    assert ask.refused(TEXT, prompt="hello " * 1200)["code"] == "context_length_exceeded"
    assert ask.refused(CHAT, max_tokens=10**5)["code"] == "context_length_exceeded"


@asserts("sglang", "validation/test_request_body_validation.py")
def a_body_of_wrong_json_is_refused(ask: Asker) -> None:
    answer = ask.client.post(CHAT, content=b"{", headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


refuses(
    "sglang", "features/test_openai_server_hidden_states.py", "return_hidden_states",
    "Hidden states are served pooled, by /v1/embeddings.", TEXT, "return_hidden_states", return_hidden_states=True,
)  # fmt: skip
