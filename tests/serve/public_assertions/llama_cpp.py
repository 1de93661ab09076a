"""Assertions of the tests of llama.cpp's server, under ``tools/server/tests/unit``."""

from __future__ import annotations

from tests.serve.public_assertions.assertions import CHAT, HI, TEXT, Asker, asserts, refuses

CHATS, COMPLETION = "test_chat_completion.py", "test_completion.py"
INFILL = "<|reserved_0|>a<|reserved_1|>b<|reserved_2|>"


@asserts("llama.cpp", CHATS)
def a_chat_has_counts_and_a_role(ask: Asker) -> None:
    found = ask.chat()
    assert "cmpl" in found["id"]
    assert (found["usage"]["completion_tokens"], found["choices"][0]["message"]["role"]) == (5, "assistant")


@asserts("llama.cpp", CHATS)
def parts_of_text_are_one_message(ask: Asker) -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "best?"}]
    whole = [{"role": "user", "content": "What is best?"}]
    assert ask.said(messages=[{"role": "user", "content": parts}]) == ask.said(messages=whole)


@asserts("llama.cpp", CHATS)
def all_chunks_have_one_id_and_the_model(ask: Asker) -> None:
    chunks = ask.stream(CHAT)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["model"] for chunk in chunks} == {"tiny"}
    assert chunks[-1]["choices"][0]["delta"] == {}


@asserts("llama.cpp", CHATS, "The build of the server is at /version, and in no field of each answer.")
def the_build_is_not_a_fingerprint(ask: Asker) -> None:
    assert "system_fingerprint" not in ask.chat()
    assert ask.client.get("/version").json()["version"]


@asserts(
    "llama.cpp", CHATS, "A last message of the assistant is continued only where continue_final_message asks for it."
)
def a_last_message_of_the_assistant(ask: Asker) -> None:
    messages = [*HI, {"role": "assistant", "content": "Whill"}]
    ended = ask.chat(messages=messages, return_token_ids=True)["prompt_token_ids"]
    assert bytes(ended).endswith(b"<assistant>Whill\n<assistant>")
    begun = ask.chat(messages=messages, return_token_ids=True, continue_final_message=True)["prompt_token_ids"]
    assert bytes(begun).endswith(b"<assistant>Whill")


@asserts("llama.cpp", CHATS)
def json_schemas_are_held_to(ask: Asker) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": "foooooo"}}}
    assert ask.said(response_format=form, max_tokens=20, ignore_eos=False) == '"foooooo"'


@asserts("llama.cpp", CHATS)
def wrong_response_formats_are_refused(ask: Asker) -> None:
    for schema in ({"type": 123}, {"type": "hiccup"}):
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        assert ask.refused(CHAT, response_format=form, ignore_eos=False)["param"] == "response_format"
    assert ask.refused(CHAT, response_format={"type": "sound"})


@asserts("llama.cpp", CHATS)
def a_gbnf_grammar_is_held_to(ask: Asker) -> None:
    assert ask.said(guided_grammar='root ::= "a" "a" "a"', max_tokens=9, ignore_eos=False) == "aaa"


@asserts("llama.cpp", CHATS)
def wrong_messages_are_refused(ask: Asker) -> None:
    for messages in (None, "string", [123], [{}], [{"role": 123}], [{"role": "system", "content": 123}], [*HI, {}]):
        assert ask.refused(CHAT, messages=messages)["param"].startswith("messages")


@asserts(
    "llama.cpp", CHATS, "Two messages of the assistant in a row are the template's to refuse; this one takes them."
)
def two_answers_in_a_row(ask: Asker) -> None:
    answer = {"role": "assistant", "content": "test"}
    assert ask.chat(messages=[*HI, answer, answer])["choices"]


@asserts("llama.cpp", CHATS)
def tokens_of_logprobs_are_the_text(ask: Asker) -> None:
    choice = ask.chat(logprobs=True, top_logprobs=10, logit_bias={"120": 100})["choices"][0]
    rows = choice["logprobs"]["content"]
    assert "".join(row["token"] for row in rows) == choice["message"]["content"]
    assert all(row["logprob"] <= 0 and row["bytes"] and row["top_logprobs"] for row in rows)


@asserts("llama.cpp", CHATS)
def logprobs_are_streamed(ask: Asker) -> None:
    chunks = [chunk["choices"][0] for chunk in ask.stream(CHAT, logprobs=True, top_logprobs=10)]
    rows = [row for one in chunks if one["logprobs"] for row in one["logprobs"]["content"]]
    assert [len(row["top_logprobs"]) for row in rows] == [10] * 5


@asserts("llama.cpp", CHATS)
def tokens_are_excluded_by_their_bias(ask: Asker) -> None:
    ids = ask.get("/tokenize", prompt="aeiou", add_special_tokens=False)["tokens"]
    text = ask.said(logit_bias={str(token): -100 for token in ids}, max_tokens=20)
    assert not set(text) & set("aeiou")


@asserts("llama.cpp", COMPLETION)
def streamed_is_not_streamed(ask: Asker) -> None:
    streamed = "".join(chunk["choices"][0]["text"] for chunk in ask.stream(TEXT, prompt="I believe"))
    assert streamed == ask.text(prompt="I believe")["choices"][0]["text"]


@asserts("llama.cpp", COMPLETION)
def the_same_seed_gives_the_same_text(ask: Asker) -> None:
    for temperature in (0.0, 1.0):
        texts = {ask.text(seed=42, temperature=temperature)["choices"][0]["text"] for _ in range(3)}
        assert len(texts) == 1


@asserts("llama.cpp", COMPLETION)
def other_seeds_give_other_texts(ask: Asker) -> None:
    texts = {ask.text(seed=seed, temperature=1.0, max_tokens=12)["choices"][0]["text"] for seed in range(4)}
    assert len(texts) == 4


@asserts("llama.cpp", COMPLETION)
def a_prompt_in_tokens_is_the_prompt_in_text(ask: Asker) -> None:
    ids = ask.get("/tokenize", prompt="I believe")["tokens"]
    texts = [choice["text"] for choice in ask.text(prompt=[ids, ids])["choices"]]
    assert texts == [ask.text(prompt="I believe")["choices"][0]["text"]] * 2


@asserts("llama.cpp", COMPLETION)
def a_cached_prompt_gives_the_same_text(ask: Asker) -> None:
    prompt = "I believe the meaning of life is"
    cold = ask.text(prompt=prompt, cache_salt="cold")
    warm = ask.text(prompt=prompt, cache_salt="cold")
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert cold["choices"] == warm["choices"]


@asserts("llama.cpp", COMPLETION)
def a_prompt_longer_than_the_context_is_refused(ask: Asker) -> None:
    assert ask.refused(TEXT, prompt="I believe the meaning of life is" * 32)["code"] == "context_length_exceeded"


@asserts("llama.cpp", COMPLETION)
def a_client_may_ask_for_nothing_more(ask: Asker) -> None:
    assert ask.text(prompt="abc", max_tokens=0, echo=True)["choices"][0]["text"] == "abc"


@asserts(
    "llama.cpp", "test_ctx_shift.py", "A context never shifts: what does not fit is refused, or truncated if asked."
)
def the_context_does_not_shift(ask: Asker) -> None:
    assert ask.refused(TEXT, max_tokens=400)["code"] == "context_length_exceeded"
    assert ask.text(prompt="a" * 1000, truncate_prompt_tokens=-1)["usage"]["prompt_tokens"] == 384 - 5


@asserts("llama.cpp", "test_infill.py")
def a_prompt_to_fill_in_is_parsed(ask: Asker) -> None:
    assert ask.get("/tokenize", prompt=INFILL)["tokens"] == [256, 258, 97, 259, 98, 260]
    assert ask.text(prompt=INFILL)["usage"]["prompt_tokens"] == 6


@asserts("llama.cpp", "test_tokenize.py")
def special_tokens_are_parsed_or_not(ask: Asker) -> None:
    parsed = ask.get("/tokenize", prompt="<|eos|>", add_special_tokens=False)["tokens"]
    plain = ask.get("/tokenize", prompt="<|eos|>", add_special_tokens=False, parse_special=False)["tokens"]
    assert (parsed, bytes(plain)) == ([257], b"<|eos|>")


@asserts("llama.cpp", "test_tokenize.py")
def pieces_of_broken_characters_differ(ask: Asker) -> None:
    found = ask.get("/tokenize", prompt="\u5927", add_special_tokens=False, return_token_strs=True)
    assert found["token_strs"] == ["bytes:\\xe5", "bytes:\\xa4", "bytes:\\xa7"]


@asserts("llama.cpp", "test_security.py")
def cors_is_off(ask: Asker) -> None:
    answer = ask.client.get("/v1/models", headers={"origin": "https://other.example"})
    assert "access-control-allow-origin" not in answer.headers


@asserts("llama.cpp", "test_log_injection.py")
def control_characters_do_not_reach_the_headers(ask: Asker) -> None:
    assert ask.client.get("/v1/models", headers={"x-request-id": "a\tb"}).headers["x-request-id"] != "a\tb"


@asserts("llama.cpp", "test_basic.py")
def the_server_is_ready(ask: Asker) -> None:
    assert ask.client.get("/health").json()["status"] == "ok"
    assert ask.client.get("/ready").json()["status"] == "ready"


@asserts("llama.cpp", "test_metrics.py")
def metrics_are_counted(ask: Asker) -> None:
    assert "prompt_tokens_total" in ask.client.get("/metrics").text


@asserts("llama.cpp", "test_tool_call.py")
def a_call_without_markers_is_a_call(ask: Asker) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    text = '{"name": "f", "arguments": {}}'
    grammar = f"root ::= {text!r}".replace("'", '"').replace(text, text.replace('"', '\\"'))
    assert ask.said(guided_grammar=grammar, max_tokens=40, ignore_eos=False) == text  # said, where there are no tools
    assert ask.chat(tools=[tool], tool_choice="none")["choices"][0]["message"].get("tool_calls") is None


for _name, _body, _why in (
    ("n_predict", {"n_predict": 8}, "OpenAI's name is max_tokens."),
    ("n_probs", {"n_probs": 10}, "OpenAI's name is logprobs."),
    ("cache_prompt", {"cache_prompt": False}, "A cache_salt of its own keeps a prompt out of the others' cache."),
    ("response_fields", {"response_fields": ["content"]}, "Answers have OpenAI's fields."),
    ("timings_per_token", {"timings_per_token": True}, "Times are at /metrics."),
    ("grammar", {"grammar": 'root ::= "a"'}, "vLLM's names are structured_outputs.grammar and guided_grammar."),
):
    refuses("llama.cpp", COMPLETION, _name, _why, TEXT, _name, **_body)
refuses(
    "llama.cpp", COMPLETION, "mixed_prompt", "A list of prompts has one kind; special tokens may be named in a text.",
    TEXT, "prompt", prompt=[1, 2, "text", 3],
)  # fmt: skip
