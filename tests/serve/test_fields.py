"""Every field that OpenAI's client can send is honoured or refused by name; honoured ones reach the engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from openai.types import chat, completion_create_params, shared_params
from openai.types.chat import completion_create_params as chat_create_params
from pydantic import BaseModel, ValidationError

from jaxllm.infer import Grammar, SamplingParams
from jaxllm.infer.scheduling.subtasks import Subtasks
from jaxllm.serve import ServeConfig
from jaxllm.serve.api import request_schemas, sampling_fields
from jaxllm.serve.api.chat_completions import ChatCompletionHandler
from jaxllm.serve.api.errors import ApiError, validation_error
from jaxllm.serve.api.request_fields import unsupported_fields
from jaxllm.serve.api.text_completions import TextCompletionHandler
from jaxllm.serve.generation import GenerationJob, RequestDispatcher
from jaxllm.serve.server_metrics import ServerMetrics
from tests.serve.servers import FixedRate

PUBLISHED = {
    request_schemas.ChatRequest: chat_create_params.CompletionCreateParamsStreaming,
    request_schemas.CompletionRequest: completion_create_params.CompletionCreateParamsStreaming,
    sampling_fields.StreamOptions: chat.ChatCompletionStreamOptionsParam,
    request_schemas.SystemMessage: chat.ChatCompletionDeveloperMessageParam,
    request_schemas.UserMessage: chat.ChatCompletionUserMessageParam,
    request_schemas.AssistantMessage: chat.ChatCompletionAssistantMessageParam,
    request_schemas.ToolMessage: chat.ChatCompletionToolMessageParam,
    request_schemas.ToolCall: chat.ChatCompletionMessageFunctionToolCallParam,
    request_schemas.Tool: chat.ChatCompletionFunctionToolParam,
    request_schemas.FunctionDefinition: shared_params.FunctionDefinition,
    request_schemas.NamedTool: chat.ChatCompletionNamedToolChoiceParam,
    request_schemas.AllowedTools: chat.ChatCompletionAllowedToolChoiceParam,
    request_schemas.AllowedSet: chat.ChatCompletionAllowedToolsParam,
    request_schemas.TextPart: chat.ChatCompletionContentPartTextParam,
}
OURS = {
    *("top_k", "min_p", "typical_p", "repetition_penalty", "min_tokens", "bad_words", "allowed_token_ids"),
    *("include_stop_str_in_output", "beams", "length_penalty", "structured_outputs", "stop_token_ids", "ignore_eos"),
    *("cache_salt", "priority", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "skip_special_tokens", "parse_special"),
    *("spaces_between_special_tokens", "truncate_prompt_tokens", "return_token_ids", "prompt_logprobs"),
    *("add_special_tokens", "truncation_side", "cache_chunks", "cache_chunk_share"),
    "cache_chunk_lead",
    *("subtask_markers", "subtasks_kept"),
}
"""Fields that OpenAI does not have."""

BASE = {"model": "m"}
CHAT = {**BASE, "messages": [{"role": "user", "content": "hi"}]}
TEXT = {**BASE, "prompt": "hi"}


def dispatcher() -> RequestDispatcher:
    return RequestDispatcher(FixedRate(), ServeConfig(), ServerMetrics("m"))


def asked(model: type[BaseModel], **fields: Any) -> ChatCompletionHandler | TextCompletionHandler:
    body = model.model_validate({**(CHAT if model is request_schemas.ChatRequest else TEXT), **fields})
    return (ChatCompletionHandler if model is request_schemas.ChatRequest else TextCompletionHandler)(
        dispatcher(), body, {}, {}
    )


def _chunk_texts(job: GenerationJob) -> list[str]:
    chunks = job.params.cached_chunks
    return [] if chunks is None else [bytes(job.prompt[start:stop]).decode() for start, stop in chunks.spans]


def params(model: type[BaseModel], **fields: Any) -> SamplingParams:
    return asked(model, **fields).jobs[0].params


@pytest.mark.parametrize("model", PUBLISHED, ids=lambda m: m.__name__)
def test_no_published_field_is_absent(model):
    published = set(PUBLISHED[model].__annotations__)
    ours = set(model.model_fields)
    assert published - ours == set()
    if model in (request_schemas.ChatRequest, request_schemas.CompletionRequest):
        assert ours - published <= OURS
    else:
        assert ours - published <= {"reasoning_content", "continuous_usage_stats"}


def _refused() -> list[Any]:
    pairs = [(model, name) for model in PUBLISHED for name in sorted(unsupported_fields(model))]
    return [pytest.param(model, name, id=f"{model.__name__}-{name}") for model, name in pairs]


@pytest.mark.parametrize(("model", "name"), _refused())
def test_what_is_not_served_is_refused_by_name(model, name):
    body = {name: {"something": "else"}}
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    found = [validation_error([error], body) for error in caught.value.errors() if error["loc"] == (name,)]
    assert [(error.status, error.param) for error in found] == [(400, name)]


# What an honoured field makes of a request: (value, what to look at, what must be there).
SHARED = {
    "n": (3, lambda a: a.jobs[0].params.n, 3),
    "seed": (2**32 + 5, lambda a: a.jobs[0].params.seed, 5),
    "stop": (["a", "b"], lambda a: a.jobs[0].params.stop, ("a", "b")),
    "temperature": (0.25, lambda a: a.jobs[0].params.temperature, 0.25),
    "top_p": (0.5, lambda a: a.jobs[0].params.top_p, 0.5),
    "top_k": (7, lambda a: a.jobs[0].params.top_k, 7),
    "min_p": (0.1, lambda a: a.jobs[0].params.min_p, 0.1),
    "stop_token_ids": ([4], lambda a: a.jobs[0].params.stop_ids, (4,)),
    "ignore_eos": (True, lambda a: a.jobs[0].params.ignore_eos, True),
    "cache_salt": ("x", lambda a: a.jobs[0].salt, "x"),
    "cache_chunks": (["hi"], lambda a: _chunk_texts(a.jobs[0]), ["hi"]),
    "subtask_markers": (["<", ">"], lambda a: a.jobs[0].params.subtasks, Subtasks((60,), (62,))),
    "frequency_penalty": (0.5, lambda a: a.jobs[0].params.frequency_penalty, 0.5),
    "presence_penalty": (-0.5, lambda a: a.jobs[0].params.presence_penalty, -0.5),
    "logit_bias": ({"7": -100}, lambda a: a.jobs[0].params.logit_bias, {7: -100.0}),
    "typical_p": (0.5, lambda a: a.jobs[0].params.typical_p, 0.5),
    "repetition_penalty": (1.2, lambda a: a.jobs[0].params.repetition_penalty, 1.2),
    "min_tokens": (3, lambda a: a.jobs[0].params.min_tokens, 3),
    "bad_words": (["x"], lambda a: a.jobs[0].params.bad_words, ("x",)),
    "allowed_token_ids": ([5], lambda a: a.jobs[0].params.allowed_tokens, (5,)),
    "include_stop_str_in_output": (True, lambda a: a.jobs[0].params.include_stop, True),
    "beams": (3, lambda a: a.jobs[0].params.beams, 3),
    "length_penalty": (0.5, lambda a: a.jobs[0].params.length_penalty, 0.5),
    "priority": (-3, lambda a: a.jobs[0].service.priority, -3),
    "structured_outputs": ({"regex": "a+"}, lambda a: a.jobs[0].params.grammar, Grammar.regex("a+")),
    "guided_json": ('{"type": "null"}', lambda a: a.jobs[0].params.grammar, Grammar.json_schema({"type": "null"})),
    "guided_regex": ("a+", lambda a: a.jobs[0].params.grammar, Grammar.regex("a+")),
    "guided_choice": (["a", "b"], lambda a: a.jobs[0].params.grammar, Grammar.choice(["a", "b"])),
    "guided_grammar": ('start: "a"', lambda a: a.jobs[0].params.grammar, Grammar.ebnf('start: "a"')),
    "skip_special_tokens": (False, lambda a: a.jobs[0].params.spelt, tuple(range(256, 272))),
    "truncate_prompt_tokens": (2, lambda a: len(a.jobs[0].prompt), 2),
    "prompt_logprobs": (3, lambda a: a.jobs[0].params.prompt_logprobs, 3),
}
HONOURED = {
    request_schemas.ChatRequest: SHARED
    | {
        "add_special_tokens": (True, lambda a: a.jobs[0].prompt[:1], [256]),
        "max_tokens": (5, lambda a: a.jobs[0].params.max_tokens, 5),
        "max_completion_tokens": (6, lambda a: a.jobs[0].params.max_tokens, 6),
        "logprobs": (True, lambda a: a.jobs[0].params.logprobs, 0),
        "response_format": (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer"}}},
            lambda a: a.jobs[0].params.grammar,
            Grammar.json_schema({"type": "integer"}),
        ),
        "add_generation_prompt": (False, lambda a: bytes(a.jobs[0].prompt), b"<user>hi\n"),
        "messages": (
            [{"role": "developer", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": " kind"}]}],
            lambda a: bytes(a.jobs[0].prompt),
            b"<system>be kind\n<assistant>",
        ),
    },
    request_schemas.CompletionRequest: SHARED
    | {
        "max_tokens": (5, lambda a: a.jobs[0].params.max_tokens, 5),
        "logprobs": (2, lambda a: a.jobs[0].params.logprobs, 2),
        "add_special_tokens": (False, lambda a: a.jobs[0].prompt, list(b"hi")),
        "best_of": (4, lambda a: a.jobs[0].params.best_of, 4),
        "echo": (True, lambda a: a.jobs[0].params.echo, True),
        "prompt": ([[1, 2], [3]], lambda a: [job.prompt for job in a.jobs], [[1, 2], [3]]),
    },
}
ELSEWHERE = {
    request_schemas.ChatRequest: {
        *("model", "stream", "stream_options", "user", "safety_identifier", "top_logprobs", "chat_template_kwargs"),
        *("tools", "tool_choice", "parallel_tool_calls", "continue_final_message", "reasoning_effort"),
    },
    request_schemas.CompletionRequest: {"model", "stream", "stream_options", "user"},
}
"""Seen by tests of their own: answers, the log, templates."""
for _names in ELSEWHERE.values():
    _names |= {
        "parse_special",
        "return_token_ids",
        "truncation_side",
        "cache_chunk_share",
        "cache_chunk_lead",
        "subtasks_kept",
    }
NO_EFFECT = {"metadata": {"a": "b"}, "spaces_between_special_tokens": False}
"""Accepted, and documented to change nothing."""


@pytest.mark.parametrize("model", HONOURED, ids=lambda m: m.__name__)
def test_every_field_is_in_one_of_the_lists(model):
    listed = set(HONOURED[model]) | ELSEWHERE[model] | unsupported_fields(model)
    assert set(model.model_fields) == listed | (NO_EFFECT.keys() & set(model.model_fields))
    for name in NO_EFFECT.keys() & set(model.model_fields):
        assert "No effect" in model.model_fields[name].description
        assert params(model, **{name: NO_EFFECT[name]}) == params(model)


@pytest.mark.parametrize(
    ("model", "name"), [pytest.param(m, n, id=f"{m.__name__}-{n}") for m, names in HONOURED.items() for n in names]
)
def test_an_honoured_field_reaches_the_engine(model, name):
    value, look, want = HONOURED[model][name]
    assert look(asked(model, **{name: value})) == want
    if name not in ("messages", "prompt"):
        assert look(asked(model)) != want
        assert look(asked(model, **{name: None})) == look(asked(model))


def test_values_that_need_each_other():
    assert params(request_schemas.ChatRequest, logprobs=True, top_logprobs=4).logprobs == 4
    assert params(request_schemas.CompletionRequest, echo=True, max_tokens=0).max_tokens == 0
    assert params(request_schemas.CompletionRequest, echo=True, logprobs=2).prompt_logprobs == 2
    assert params(request_schemas.ChatRequest, response_format={"type": "text"}).grammar is None
    made = params(request_schemas.ChatRequest, response_format={"type": "json_object"}).grammar
    assert made == Grammar.json_schema({"type": "object"})
    for fields in (
        {"structured_outputs": {}},
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        {"structured_outputs": {"json_object": True, "json": {}}},
        {"structured_outputs": {"json": "[1]"}},
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a"}, "guided_regex": "a"},
    ):
        with pytest.raises(ApiError) as caught:
            params(request_schemas.ChatRequest, **fields)
        assert caught.value.param == "structured_outputs"
    made = params(request_schemas.ChatRequest, structured_outputs={"json_object": True}).grammar
    assert made == Grammar.json_schema({"type": "object"})
    assert params(request_schemas.CompletionRequest).max_tokens == 16
    assert params(request_schemas.ChatRequest).max_tokens == FixedRate().max_len - len("<user>hi\n<assistant>")


@pytest.mark.parametrize("value", [True, "1", 1.5, float("nan"), -1, 10**30])
def test_types_are_strict(value):
    with pytest.raises(ValidationError):
        request_schemas.ChatRequest.model_validate({**CHAT, "max_tokens": value})


def test_json_has_one_kind_of_number():
    assert params(request_schemas.ChatRequest, max_tokens=3.0).max_tokens == 3


def test_usage_is_summed_over_prompts_and_completions():
    """Three prompts of 1, 3 and 2 tokens, two completions of four tokens for each; whole, streamed and in the log."""
    fields = {"prompt": [[65], [66, 67, 68], [69, 70]], "n": 2, "max_tokens": 4}
    usage = {"prompt_tokens": 6, "completion_tokens": 24, "total_tokens": 30}
    usage["prompt_tokens_details"] = {"cached_tokens": 0}
    whole = asked(request_schemas.CompletionRequest, **fields)
    streamed = asked(request_schemas.CompletionRequest, **fields, stream=True, stream_options={"include_usage": True})

    async def events() -> list[str]:
        return [one async for one in streamed.events()]

    assert asyncio.run(whole.whole())["usage"] == usage
    last, done = asyncio.run(events())[-2:]
    assert json.loads(last.removeprefix("data: "))["usage"] == usage
    assert "[DONE]" in done
    assert [whole._record[name] for name in ("prompt_tokens", "completion_tokens")] == [6, 24]


def test_a_context_is_filled_and_not_exceeded():
    """A prompt and max_tokens may take all of the context, and no token more."""
    limit = FixedRate().max_len
    asked(request_schemas.CompletionRequest, prompt=[65] * 10, max_tokens=limit - 10)
    with pytest.raises(ApiError, match=f"10 prompt tokens and max_tokens = {limit - 9} are {limit + 1} tokens"):
        asked(request_schemas.CompletionRequest, prompt=[65] * 10, max_tokens=limit - 9)


def test_the_queue_is_filled_and_not_exceeded():
    """Three running and two queued sequences; what has ended makes room for as many again."""
    found = RequestDispatcher(FixedRate(sequences=3), ServeConfig(queue=2), ServerMetrics("m"))
    release = found.admit(3)
    also = found.admit(2)
    with pytest.raises(ApiError, match="5 of 5 sequences are running or queued"):
        found.admit(1)
    release()
    assert found.open == 2
    with pytest.raises(ApiError, match="2 of 5"):
        found.admit(4)
    found.admit(3)
    also()
    assert found.open == 3
