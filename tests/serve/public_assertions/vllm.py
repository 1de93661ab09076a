"""Assertions of vLLM's tests under ``tests/entrypoints/openai``."""

from __future__ import annotations

from tests.serve.public_assertions.assertions import CHAT, HI, TEXT, Asker, asserts, refuses

COMPLETION = "completion/test_completion.py"
CHATS = "chat_completion/test_chat.py"
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}


@asserts("vllm", COMPLETION)
def a_completion_has_its_counts(ask: Asker) -> None:
    found = ask.text(cache_salt="fresh")
    assert (len(found["choices"]), found["choices"][0]["finish_reason"]) == (1, "length")
    usage = found["usage"]
    assert (usage["completion_tokens"], usage["total_tokens"]) == (5, usage["prompt_tokens"] + 5)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


@asserts("vllm", COMPLETION)
def token_ids_are_a_prompt(ask: Asker) -> None:
    found = ask.text(prompt=[0, 0, 0, 0, 0])
    assert (found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"]) == (5, 5)
    assert found["choices"][0].get("prompt_logprobs") is None


@asserts("vllm", COMPLETION)
def the_side_of_truncation_is_chosen(ask: Asker) -> None:
    body = {"prompt": list(range(8)), "return_token_ids": True, "truncate_prompt_tokens": 4}
    assert ask.text(**body, truncation_side="right")["choices"][0]["prompt_token_ids"] == [0, 1, 2, 3]
    assert ask.text(**body, truncation_side="left")["choices"][0]["prompt_token_ids"] == [4, 5, 6, 7]


@asserts("vllm", COMPLETION)
def no_logprobs_unless_requested(ask: Asker) -> None:
    assert ask.text(logprobs=None)["choices"][0]["logprobs"] is None


@asserts("vllm", COMPLETION)
def zero_logprobs_list_one(ask: Asker) -> None:
    scores = ask.text(prompt=[0] * 5, logprobs=0)["choices"][0]["logprobs"]
    assert [len(row) for row in scores["top_logprobs"]] == [1] * 5


@asserts("vllm", COMPLETION)
def five_logprobs_list_five_or_six(ask: Asker) -> None:
    scores = ask.text(prompt=[0] * 5, logprobs=5)["choices"][0]["logprobs"]
    assert all(5 <= len(row) <= 6 for row in scores["top_logprobs"])


@asserts("vllm", COMPLETION)
def more_logprobs_than_20_are_refused_and_serving_goes_on(ask: Asker) -> None:
    assert ask.refused(TEXT, logprobs=21)["param"] == "logprobs"
    assert ask.refused(TEXT, logprobs=30, stream=True)["param"] == "logprobs"
    assert ask.text()["choices"]


@asserts("vllm", COMPLETION)
def prompt_logprobs_are_given_for_each_prompt(ask: Asker) -> None:
    for choice in ask.text(prompt=["A robot may not", "My name is"], prompt_logprobs=1)["choices"]:
        assert choice["prompt_logprobs"][0] is None
        assert choice["prompt_logprobs"][1]
    assert ask.refused(TEXT, prompt_logprobs=-1)["param"] == "prompt_logprobs"


@asserts("vllm", COMPLETION)
def a_stream_is_the_whole_text_and_ends_once(ask: Asker) -> None:
    choices = [chunk["choices"][0] for chunk in ask.stream(TEXT)]
    assert "".join(choice["text"] for choice in choices) == ask.text()["choices"][0]["text"]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    assert choices[-1]["finish_reason"] == "length"


@asserts("vllm", COMPLETION)
def parallel_completions_differ(ask: Asker) -> None:
    choices = ask.text(n=3, temperature=1.0, seed=42, max_tokens=20)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert len({choice["text"] for choice in choices}) == 3


@asserts("vllm", COMPLETION)
def parallel_streams_have_indices(ask: Asker) -> None:
    choices = [chunk["choices"][0] for chunk in ask.stream(TEXT, n=3, temperature=1.0, seed=42, max_tokens=20)]
    assert sorted(choice["index"] for choice in choices if choice["finish_reason"]) == [0, 1, 2]


@asserts("vllm", COMPLETION)
def usage_of_a_stream_comes_last(ask: Asker) -> None:
    assert all(chunk.get("usage") is None for chunk in ask.stream(TEXT, stream_options={"include_usage": False}))
    assert all(chunk.get("usage") is None for chunk in ask.stream(TEXT, stream_options={}))
    *chunks, last = ask.stream(TEXT, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 5)


@asserts("vllm", COMPLETION)
def usage_in_every_chunk(ask: Asker) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for chunk in ask.stream(TEXT, stream_options=options):
        usage = chunk["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] > 0


@asserts(
    "vllm", COMPLETION, "vLLM ignores continuous_usage_stats without include_usage; here it is honoured by itself."
)
def continuous_usage_alone(ask: Asker) -> None:
    assert all(chunk["usage"] for chunk in ask.stream(TEXT, stream_options={"continuous_usage_stats": True}))


@asserts("vllm", COMPLETION)
def stream_options_need_a_stream(ask: Asker) -> None:
    for options in ({"include_usage": None}, {"include_usage": True}, {}):
        assert ask.refused(TEXT, stream_options=options)["param"] == "stream_options"


@asserts("vllm", COMPLETION)
def prompts_come_in_batches(ask: Asker) -> None:
    alone, *batch = ask.text(prompt="ab")["choices"] + ask.text(prompt=["ab", "ab"])["choices"]
    assert [choice["text"] for choice in batch] == [alone["text"]] * 2
    stream = ask.stream(TEXT, prompt=["ab", "ab"])
    assert {chunk["choices"][0]["index"] for chunk in stream} == {0, 1}


@asserts("vllm", COMPLETION)
def an_echo_has_the_prompt_and_its_scores(ask: Asker) -> None:
    for logprobs in (None, 0, 1):
        choice = ask.text(prompt="abc", echo=True, logprobs=logprobs)["choices"][0]
        assert choice["text"].startswith("abc")
        if logprobs is not None:
            assert choice["logprobs"]["token_logprobs"][0] is None
            assert choice["logprobs"]["top_logprobs"][0] is None
            assert len(choice["logprobs"]["tokens"]) == 4 + 5


@asserts("vllm", "completion/test_prompt_validation.py")
def an_empty_prompt_is_refused(ask: Asker) -> None:
    assert ask.refused(TEXT, prompt=[])["param"] == "prompt"
    assert ask.refused(TEXT, prompt=...)["code"] == "missing_required_parameter"


@asserts("vllm", "completion/test_prompt_validation.py")
def token_ids_outside_the_vocabulary_are_refused(ask: Asker) -> None:
    assert ask.refused(TEXT, prompt=[10**6])["param"] == "prompt"
    assert ask.refused(TEXT, prompt=[-1])["param"] == "prompt"


@asserts("vllm", "completion/test_completion_text_offset.py")
def offsets_are_those_of_the_text(ask: Asker) -> None:
    choice = ask.text(prompt="abc", echo=True, logprobs=0, logit_bias={"120": 100})["choices"][0]
    for token, at in zip(choice["logprobs"]["tokens"][1:], choice["logprobs"]["text_offset"][1:], strict=True):
        assert choice["text"][at:].startswith(token)


@asserts("vllm", "basic/test_return_token_ids.py")
def token_ids_are_returned(ask: Asker) -> None:
    ids = ask.get("/tokenize", prompt="abc")["tokens"]
    choice = ask.text(prompt="abc", return_token_ids=True)["choices"][0]
    assert (choice["prompt_token_ids"], len(choice["token_ids"])) == (ids, 5)
    chat = ask.chat(return_token_ids=True)
    assert chat["prompt_token_ids"] == ask.get("/tokenize", messages=HI)["tokens"]
    assert ask.chat().get("prompt_token_ids") is None


@asserts("vllm", "basic/test_chat_logit_bias_validation.py")
def logit_bias_of_unknown_tokens_is_refused(ask: Asker) -> None:
    assert ask.chat(logit_bias={"1": 1.0})
    for bias in ({"999999": 1.0}, {"-1": 1.0}):
        assert "logit_bias" in ask.refused(CHAT, logit_bias=bias)["param"]


@asserts("vllm", CHATS)
def chat_logprobs_need_the_switch(ask: Asker) -> None:
    assert ask.chat(logprobs=False)["choices"][0]["logprobs"] is None
    assert ask.refused(CHAT, top_logprobs=5)["param"] == "top_logprobs"
    assert ask.refused(CHAT, logprobs=True, top_logprobs=21)["param"] == "top_logprobs"
    for many in (0, 5):
        rows = ask.chat(logprobs=True, top_logprobs=many)["choices"][0]["logprobs"]["content"]
        assert [len(row["top_logprobs"]) for row in rows] == [many] * 5


@asserts("vllm", CHATS)
def a_chat_streams_its_role_first(ask: Asker) -> None:
    first, *rest = [chunk["choices"][0] for chunk in ask.stream(CHAT)]
    assert first["delta"]["role"] == "assistant"
    assert all("role" not in choice["delta"] for choice in rest)
    assert "".join(choice["delta"].get("content") or "" for choice in rest) == ask.said()
    assert [choice["finish_reason"] for choice in rest if choice["finish_reason"]] == ["length"]


@asserts("vllm", CHATS)
def a_response_format_is_held_to(ask: Asker) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    assert ask.said(response_format=form, max_tokens=40, ignore_eos=False) in ('{"a":"x"}', '{"a":"y"}')


@asserts("vllm", CHATS)
def a_guided_choice_is_held_to(ask: Asker) -> None:
    for fields in ({"structured_outputs": {"choice": ["Python", "C"]}}, {"guided_choice": ["Python", "C"]}):
        assert ask.said(**fields, max_tokens=20, ignore_eos=False) in ("Python", "C")


@asserts("vllm", CHATS)
def an_unknown_response_format_is_refused(ask: Asker) -> None:
    assert ask.refused(CHAT, response_format={"type": "text_or_so"})["param"].startswith("response_format")


@asserts("vllm", CHATS)
def extra_fields_of_openai_are_taken(ask: Asker) -> None:
    assert ask.chat(metadata={"run": "1"}, user="me", service_tier="auto", store=False, reasoning_effort="low")


@asserts("vllm", "chat_completion/test_tool_choice_null.py")
def a_null_tool_choice_is_none_given(ask: Asker) -> None:
    assert ask.chat(tool_choice=None)["choices"][0]["finish_reason"] == "length"


@asserts("vllm", "chat_completion/test_non_object_body_validation.py")
def a_body_that_is_no_object_is_refused(ask: Asker) -> None:
    for body in (b"[]", b'"a"', b"1", b"null", b""):
        answer = ask.client.post(CHAT, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"


@asserts("vllm", "basic/test_basic.py")
def health_and_version(ask: Asker) -> None:
    assert ask.client.get("/health").status_code == 200
    assert ask.client.get("/version").json()["version"]


@asserts("vllm", "test_tokenization.py")
def tokenize_and_back(ask: Asker) -> None:
    found = ask.get("/tokenize", prompt="vllm1 This is a test.", add_special_tokens=False, return_token_strs=True)
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), 384)
    assert "".join(found["token_strs"]) == "vllm1 This is a test."
    assert ask.get("/detokenize", tokens=found["tokens"])["prompt"] == "vllm1 This is a test."
    for special in (False, True):
        ids = ask.get("/tokenize", prompt="a", add_special_tokens=special)["tokens"]
        assert len(ids) == 1 + special


@asserts("vllm", "test_tokenization.py")
def a_chat_is_tokenized_as_it_is_answered(ask: Asker) -> None:
    for begins in (True, False):
        ids = ask.get("/tokenize", messages=HI, add_generation_prompt=begins)["tokens"]
        assert ask.get("/detokenize", tokens=ids)["prompt"].endswith("<assistant>") == begins
    messages = [*HI, {"role": "assistant", "content": "Sure,"}]
    ids = ask.get("/tokenize", messages=messages, add_generation_prompt=False, continue_final_message=True)["tokens"]
    assert ask.get("/detokenize", tokens=ids)["prompt"].endswith("Sure,")


@asserts("vllm", "test_tokenization.py")
def both_switches_of_the_last_turn_are_refused(ask: Asker) -> None:
    body = {"add_generation_prompt": True, "continue_final_message": True}
    assert ask.refused(CHAT, **body)["param"] == "continue_final_message"


refuses(
    "vllm", "basic/test_chat_echo.py", "chat_echo", "A chat has no text to echo; return_token_ids shows its prompt.",
    CHAT, "echo", echo=True,
)  # fmt: skip
refuses(
    "vllm", "completion/test_completion_with_prompt_embeds.py", "prompt_embeds",
    "Serialised tensors of clients are not loaded.", TEXT, "prompt_embeds", prompt_embeds="AAAA",
)  # fmt: skip
refuses(
    "vllm", "chat_completion/test_vision.py", "images", "Models here read text.", CHAT, "messages[0].content",
    messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
)  # fmt: skip
refuses(
    "vllm", "completion/test_completion.py", "structural_tag", "Tools and response_format cover it.", CHAT,
    "structured_outputs.structural_tag", structured_outputs={"structural_tag": "{}"},
)  # fmt: skip
