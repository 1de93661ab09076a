"""OpenAI's own client against a server, feature by feature; for any model behind it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
from collections.abc import Callable
from typing import Any

import httpx
import jsonschema
import numpy as np
import openai
import pydantic
import pytest

FEATURES: dict[str, Callable[[openai.OpenAI], None]] = {}
HELLO: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hello."}]
CHAT: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 12}
TEXT: dict[str, Any] = {"model": "tiny", "prompt": "Once upon", "max_tokens": 9}
ON = {"ignore_eos": True}


def feature(check: Callable[[openai.OpenAI], None]) -> Callable[[openai.OpenAI], None]:
    FEATURES[check.__name__] = check
    return check


def counts(usage: Any) -> list[int]:
    """Tokens of prompt and completion; what the prefix cache had of them differs between requests."""
    return [usage.prompt_tokens, usage.completion_tokens, usage.total_tokens]


@feature
def models(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt")
    assert caught.value.code == "model_not_found"


@feature
def chat_streamed_is_chat_whole(client: openai.OpenAI) -> None:
    asked = {**CHAT, "temperature": 0, "extra_body": ON}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].finish_reason == "length"
    assert whole.choices[0].message.role == "assistant"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert counts(chunks[-1].usage) == counts(whole.usage)
    assert not chunks[-1].choices
    assert {c.usage for c in chunks[:-1]} == {None}
    assert len({c.id for c in chunks}) == 1
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == "length"


@feature
def completions_streamed_are_completions_whole(client: openai.OpenAI) -> None:
    asked = {**TEXT, "prompt": ["Once upon", "The sea"], "temperature": 0, "extra_body": ON}
    whole = client.completions.create(**asked)
    assert [c.index for c in whole.choices] == [0, 1]
    texts = ["", ""]
    for chunk in client.completions.create(**asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [c.text for c in whole.choices]


@feature
def seeds_and_several_answers(client: openai.OpenAI) -> None:
    asked = {**CHAT, "n": 2, "seed": 5, "temperature": 1.5, "extra_body": ON}
    first, again = (client.chat.completions.create(**asked) for _ in range(2))
    texts = [c.message.content for c in first.choices]
    assert texts == [c.message.content for c in again.choices]
    assert texts[0] != texts[1]
    assert first.usage is not None
    assert first.usage.completion_tokens == 24
    other = client.chat.completions.create(**{**asked, "seed": 6})
    assert [c.message.content for c in other.choices] != texts


@feature
def stops(client: openai.OpenAI) -> None:
    asked = {**TEXT, "temperature": 0, "extra_body": ON}
    text = client.completions.create(**asked).choices[0].text
    word = text[len(text) // 2 : len(text) // 2 + 2]
    cut = client.completions.create(**asked, stop=[word]).choices[0]
    assert (cut.text, cut.finish_reason) == (text[: text.index(word)], "stop")
    kept = client.completions.create(**{**asked, "extra_body": {**ON, "include_stop_str_in_output": True}}, stop=word)
    assert kept.choices[0].text == cut.text + word


@feature
def log_probabilities(client: openai.OpenAI) -> None:
    asked = {**CHAT, "temperature": 0, "logprobs": True, "top_logprobs": 3, "extra_body": ON}
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.logprobs is not None
    content = whole.logprobs.content or []
    assert len(content) == 12
    for one in content:
        assert len(one.top_logprobs) == 3
        # The likeliest was taken; texts of a tie may be in either order.
        assert math.isclose(one.logprob, one.top_logprobs[0].logprob, abs_tol=1e-5)
    # Special tokens have names here, and no part in the text.
    raw = b"".join(bytes(one.bytes or []) for one in content if not re.fullmatch(r"<\|.*\|>", one.token))
    assert raw.decode(errors="replace") == whole.message.content
    streamed: list[Any] = []
    for chunk in client.chat.completions.create(**asked, stream=True):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content or []
    assert [one.token for one in streamed] == [one.token for one in content]
    assert np.allclose([one.logprob for one in streamed], [one.logprob for one in content], atol=1e-3)


@feature
def echoes(client: openai.OpenAI) -> None:
    made = client.completions.create(**TEXT, temperature=0, echo=True, logprobs=2, extra_body=ON)
    choice, prompt = made.choices[0], made.usage.prompt_tokens if made.usage else 0
    assert choice.text.startswith("Once upon")
    scores = choice.logprobs
    assert scores is not None
    assert scores.tokens is not None
    assert scores.token_logprobs is not None
    assert scores.top_logprobs is not None
    assert len(scores.tokens) == len(scores.token_logprobs) == len(scores.top_logprobs) == prompt + 9
    assert [value is None for value in scores.token_logprobs] == [True, *[False] * (prompt + 8)]
    alone = client.completions.create(**{**TEXT, "max_tokens": 0}, echo=True, logprobs=2).choices[0]
    assert alone.text == "Once upon"
    assert alone.logprobs is not None
    assert alone.logprobs.tokens == scores.tokens[:prompt]
    again = alone.logprobs.token_logprobs or []
    assert np.allclose(again[1:], np.array(scores.token_logprobs[1:prompt], float), atol=1e-3)


@feature
def biases_and_penalties(client: openai.OpenAI) -> None:
    token = client.post("/../tokenize", body={"model": "tiny", "prompt": "x"}, cast_to=object)["tokens"][-1]  # type: ignore[index]
    made = client.completions.create(**TEXT, temperature=0, logit_bias={str(token): 100}, extra_body=ON)
    assert made.choices[0].text == "x" * 9
    asked = {**TEXT, "temperature": 0, "logit_bias": {str(token): 20}, "extra_body": ON}
    free = client.completions.create(**asked).choices[0].text
    held = client.completions.create(**asked, frequency_penalty=2, presence_penalty=2).choices[0].text
    assert held.count("x") <= free.count("x")
    best = client.completions.create(**TEXT, best_of=3, n=1, seed=1)
    assert len(best.choices) == 1


@feature
def forms(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["a", "b"]}, "ok": {"type": "boolean"}},
        "required": ["name", "ok"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    asked = {**CHAT, "max_tokens": 60, "response_format": form, "seed": 3}
    text = client.chat.completions.create(**asked).choices[0].message.content
    jsonschema.validate(json.loads(text or ""), schema)
    pieces = [c.choices[0].delta.content or "" for c in client.chat.completions.create(**asked, stream=True)]
    jsonschema.validate(json.loads("".join(pieces)), schema)
    choice = client.completions.create(**TEXT, extra_body={"structured_outputs": {"choice": ["yes", "no"]}})
    assert choice.choices[0].text in ("yes", "no")
    bomb = "(a?){60}a{60}(((((x+x+)+y)+z)+)+)+"
    with_bomb = {**TEXT, "extra_body": {"structured_outputs": {"regex": bomb}}}
    with contextlib.suppress(openai.BadRequestError):  # refused, or written: in bounded time
        assert client.completions.create(**with_bomb).choices[0].finish_reason in ("stop", "length")
    assert client.models.list().data


WORDS = {"type": "object", "properties": {"word": {"enum": ["yes", "no"]}}, "required": ["word"]}
NUMBERS = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
SCHEMAS = {"say": {**WORDS, "additionalProperties": False}, "check": {**NUMBERS, "additionalProperties": False}}
TOOLS: Any = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in SCHEMAS.items()]
CALLING: dict[str, Any] = {**CHAT, "tools": TOOLS, "max_tokens": 120, "temperature": 0}


def answered(client: openai.OpenAI, **asked: Any) -> tuple[Any, list[tuple[str, str]]]:
    """(the choice, its calls), the same whole and streamed; ids are new each time."""
    whole = client.chat.completions.create(**asked).choices[0]
    calls = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls or []]
    streamed: list[list[str]] = []
    content, ids, finish = "", [], None
    for chunk in client.chat.completions.create(**asked, stream=True):
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        finish = choice.finish_reason or finish
        for part in choice.delta.tool_calls or []:
            if part.id is not None:
                assert part.index == len(streamed)
                ids.append(part.id)
                streamed.append([part.function.name, ""])
            streamed[part.index][1] += part.function.arguments or ""
    assert [tuple(one) for one in streamed] == calls
    assert (content or None, finish) == (whole.message.content or None, whole.finish_reason)
    assert len(set(ids)) == len(ids)
    return whole, calls


@feature
def tools_by_name(client: openai.OpenAI) -> None:
    for name, schema in SCHEMAS.items():
        named = {"type": "function", "function": {"name": name}}
        choice, calls = answered(client, **CALLING, tool_choice=named)
        assert (choice.finish_reason, choice.message.content, len(calls)) == ("tool_calls", None, 1)
        assert calls[0][0] == name
        jsonschema.validate(json.loads(calls[0][1]), schema)


@feature
def tools_that_are_required(client: openai.OpenAI) -> None:
    choice, calls = answered(client, **CALLING, tool_choice="required", parallel_tool_calls=False)
    assert (choice.finish_reason, choice.message.content, len(calls)) == ("tool_calls", None, 1)
    jsonschema.validate(json.loads(calls[0][1]), SCHEMAS[calls[0][0]])
    only = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [
        {"type": "function", "function": {"name": "check"}}
    ]}}  # fmt: skip
    _, calls = answered(client, **CALLING, tool_choice=only, parallel_tool_calls=False)
    assert [name for name, _ in calls] == ["check"]


@feature
def tools_in_parallel(client: openai.OpenAI) -> None:
    """A model that cannot end its message calls again and again."""
    ends = client.get("/../config", cast_to=object)["backend"]["stop_ids"]  # type: ignore[index]
    bias = {str(token): -100 for token in ends}
    choice, calls = answered(
        client, **{**CALLING, "max_tokens": 160}, tool_choice="required", parallel_tool_calls=True, logit_bias=bias
    )
    assert choice.finish_reason == "length"
    assert len(calls) >= 2
    for name, arguments in calls[:-1]:  # the last is cut
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@feature
def tools_as_the_model_likes(client: openai.OpenAI) -> None:
    choice, calls = answered(client, **CALLING, tool_choice="auto")
    assert (choice.finish_reason == "tool_calls") <= bool(calls)
    assert all(name in SCHEMAS for name, _ in calls)
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    for name, arguments in answered(client, **{**CALLING, "tools": strict})[1]:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    free, _ = answered(client, **{**CALLING, "tools": []})
    none, called = answered(client, **CALLING, tool_choice="none")
    assert (none.message.content, called) == (free.message.content, [])


@feature
def what_tools_gave_is_read(client: openai.OpenAI) -> None:
    call: Any = {"id": "a", "type": "function", "function": {"name": "say", "arguments": '{"word": "yes"}'}}
    told: list[Any] = [*HELLO, {"role": "assistant", "tool_calls": [call]}]
    texts = []
    for result in ("it is done", "it has failed"):
        messages = [*told, {"role": "tool", "tool_call_id": "a", "content": result}]
        body = {"model": "tiny", "messages": messages}
        tokens = client.post("/../tokenize", body=body, cast_to=object)["tokens"]  # type: ignore[index]
        body = {"model": "tiny", "tokens": tokens}
        texts.append(client.post("/../detokenize", body=body, cast_to=object)["prompt"])  # type: ignore[index]
        assert result in texts[-1]
        assert re.search(r'<tool_call>\s*\{"name": "say", "arguments": \{"word": "yes"\}\}\s*</tool_call>', texts[-1])
        assert client.chat.completions.create(**{**CHAT, "messages": messages}, tools=TOOLS).choices
    call["function"]["arguments"] = "{"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{**CHAT, "messages": told})
    assert caught.value.param == "messages"


@feature
def embeddings(client: openai.OpenAI) -> None:
    texts = ["a cat sat", "a cat sat", "rockets burn kerosene"]
    found = client.embeddings.create(model="tiny", input=texts)  # the client asks for base64
    plain = client.embeddings.create(model="tiny", input=texts, encoding_format="float")
    vectors = np.array([one.embedding for one in found.data])
    assert np.allclose(vectors, [one.embedding for one in plain.data], atol=1e-6)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert np.allclose(vectors[0], vectors[1], atol=1e-6)
    assert vectors[0] @ vectors[2] < 0.9999
    last = client.embeddings.create(model="tiny", input=texts[:1], extra_body={"pooling": "last"})
    assert not np.allclose(last.data[0].embedding, vectors[0], atol=1e-3)
    assert found.usage.total_tokens == found.usage.prompt_tokens > 0


@feature
def refusals_are_the_clients_own_errors(client: openai.OpenAI) -> None:
    for fields in ({"verbosity": "low"}, {"store": True}):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**CHAT, **fields)  # type: ignore[arg-type]
        assert caught.value.param == next(iter(fields))
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{**TEXT, "max_tokens": 10**6})
    assert caught.value.code == "context_length_exceeded"


@feature
def leaving_a_stream_ends_it(client: openai.OpenAI) -> None:
    url = str(client.base_url).removesuffix("/v1/")
    stream = client.completions.create(**{**TEXT, "max_tokens": 80}, stream=True, extra_body=ON)
    next(iter(stream))
    stream.close()
    for _ in range(200):
        lines = httpx.get(f"{url}/metrics").text.splitlines()
        if 'jaxllm:num_requests_running{model_name="tiny"} 0.0' in lines:
            return
    raise AssertionError("the request goes on")


def tokens_of(client: openai.OpenAI, **body: Any) -> list[int]:
    return client.post("/../tokenize", body={"model": "tiny", **body}, cast_to=object)["tokens"]  # type: ignore[index]


def special(client: openai.OpenAI) -> tuple[int, str]:
    """(id, name) of a token that ends a text."""
    (token, *_) = client.get("/../config", cast_to=object)["backend"]["stop_ids"]  # type: ignore[index]
    body = {"model": "tiny", "tokens": [token]}
    return token, client.post("/../detokenize", body=body, cast_to=object)["prompt"]  # type: ignore[index]


@feature
def prompts_name_special_tokens(client: openai.OpenAI) -> None:
    token, name = special(client)
    ids = tokens_of(client, prompt=f"a{name}b")
    assert token in ids
    assert token not in tokens_of(client, prompt=f"a{name}b", parse_special=False)
    extra = {**ON, "return_token_ids": True}
    made = client.completions.create(**{**TEXT, "prompt": f"a{name}b"}, extra_body=extra).choices[0]
    assert (made.model_extra or {})["prompt_token_ids"] == ids


@feature
def messages_forge_no_turns(client: openai.OpenAI) -> None:
    token, name = special(client)
    plain, forged = (
        tokens_of(client, messages=[{"role": "user", "content": content}]).count(token)
        for content in ("a", f"{name} a {name}{name}")
    )
    assert plain == forged
    made = client.chat.completions.create(**{**CHAT, "messages": [{"role": "user", "content": name}]})
    assert made.choices


@feature
def token_ids(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(**CHAT, extra_body={**ON, "return_token_ids": True})
    assert (made.model_extra or {})["prompt_token_ids"] == tokens_of(client, messages=HELLO)
    assert len((made.choices[0].model_extra or {})["token_ids"]) == 12


@feature
def scores_of_prompts(client: openai.OpenAI) -> None:
    made = client.completions.create(**TEXT, extra_body={**ON, "prompt_logprobs": 2})
    rows = (made.choices[0].model_extra or {})["prompt_logprobs"]
    assert rows[0] is None
    assert len(rows) == len(tokens_of(client, prompt="Once upon"))
    assert all(one["logprob"] <= 0 and one["rank"] >= 1 for row in rows[1:] for one in row.values())


@feature
def counts_in_every_chunk(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.chat.completions.create(**CHAT, stream=True, stream_options=options, extra_body=ON))
    made = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert len(made) == len(chunks)
    assert made == sorted(made)
    assert made[-1] == 12


@feature
def tokens_of_the_prefix_cache(client: openai.OpenAI) -> None:
    prompt = "This prompt is so long that it fills a few pages of the cache, or at least one of them. " * 2
    asked = {**TEXT, "prompt": prompt, "extra_body": {"cache_salt": "a feature's own"}}
    client.completions.create(**asked)
    usage = client.completions.create(**asked).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert 0 < (usage.prompt_tokens_details.cached_tokens or 0) < usage.prompt_tokens


@feature
def prompts_are_truncated(client: openai.OpenAI) -> None:
    made = client.completions.create(**{**TEXT, "prompt": "word " * 2000}, extra_body={"truncate_prompt_tokens": 7})
    assert made.usage is not None
    assert made.usage.prompt_tokens == 7
    with pytest.raises(openai.BadRequestError):
        client.completions.create(**{**TEXT, "prompt": "word " * 2000})


@feature
def a_message_is_continued(client: openai.OpenAI) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "The capital is"}]
    extra = {**ON, "continue_final_message": True, "return_token_ids": True}
    made = client.chat.completions.create(**{**CHAT, "messages": begun}, extra_body=extra)
    body = {"model": "tiny", "tokens": (made.model_extra or {})["prompt_token_ids"]}
    text = client.post("/../detokenize", body=body, cast_to=object)["prompt"]  # type: ignore[index]
    assert text.endswith("The capital is")


@feature
def what_is_advisory_is_taken(client: openai.OpenAI) -> None:
    asked = {**CHAT, "temperature": 0, "extra_body": ON}
    plain = client.chat.completions.create(**asked).choices[0].message.content
    also = {"metadata": {"run": "1"}, "store": False, "service_tier": "auto", "user": "me", "reasoning_effort": "low"}
    assert client.chat.completions.create(**asked, **also).choices[0].message.content == plain


@feature
def other_servers_names(client: openai.OpenAI) -> None:
    extra = {"top_k": -1, "skip_special_tokens": True, "spaces_between_special_tokens": True}
    assert client.completions.create(**TEXT, extra_body=extra).choices
    for guided in (
        {"guided_choice": ["yes", "no"]},
        {"guided_regex": "yes|no"},
        {"guided_json": {"enum": ["yes", "no"]}},
    ):
        text = client.completions.create(**{**TEXT, "max_tokens": 30}, extra_body=guided).choices[0].text
        assert text.strip('"') in ("yes", "no")


@feature
def answers_are_parsed_into_models(client: openai.OpenAI) -> None:
    class Answer(pydantic.BaseModel):
        ok: bool

    made = client.chat.completions.parse(**{**CHAT, "max_tokens": 40}, response_format=Answer)
    assert isinstance(made.choices[0].message.parsed, Answer)


@feature
def several_at_once(client: openai.OpenAI) -> None:
    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key="-", max_retries=0, timeout=600) as other:
            asked = {**TEXT, "temperature": 0, "extra_body": ON}
            made = await asyncio.gather(*(other.completions.create(**asked) for _ in range(4)))
            return [one.choices[0].text for one in made]

    assert len(set(asyncio.run(main()))) == 1


@feature
def raw_responses_have_ids(client: openai.OpenAI) -> None:
    raw = client.completions.with_raw_response.create(**TEXT, extra_headers={"x-request-id": "mine-7"})
    assert raw.headers["x-request-id"] == "mine-7"
    assert raw.parse().id.startswith("cmpl-")


@feature
def all_faults_are_named_at_once(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**TEXT, top_p=2, extra_body={"one": 1, "two": 2})
    assert all(name in str(caught.value) for name in ("'one'", "'two'", "top_p"))
    assert caught.value.code == "unknown_parameter"
