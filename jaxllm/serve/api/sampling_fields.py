"""Sampling fields: those that chat completions and text completions share, OpenAI's and extensions of this server."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from jaxllm.serve.api.request_fields import (
    WHOLE_NUMBER,
    Fraction,
    Name,
    Penalty,
    RequestModel,
    Seed,
    Stop,
    Temperature,
    Token,
    Truncation,
    UnsupportedField,
)

TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
GrammarText = Annotated[str, Field(min_length=1, max_length=100_000)]
Choices = Annotated[list[Stop], Field(min_length=1, max_length=256)]
Schema = dict[str, Any] | Annotated[str, Field(max_length=100_000, json_schema_extra={"format": "json"})]
"""JSON schema, as an object or as its text."""


class StreamOptions(RequestModel):
    """Options of a streamed response."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(
        default=None, description="Extension, with include_usage: every chunk has the counts so far."
    )
    include_obfuscation: Annotated[Any, UnsupportedField("chunks are not padded", False)] = None


class StructuredOutputs(RequestModel):
    """Constraint on the generated text, exactly one of these. An extension of OpenAI's API."""

    json_: Schema | None = Field(default=None, alias="json")
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = Field(default=None, description="True: any JSON object.")


class SamplingFields(RequestModel):
    """Sampling fields that chat completions and text completions share."""

    model: Name
    n: Annotated[int, Field(ge=1, le=128), WHOLE_NUMBER] | None = None
    seed: Seed | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Temperature | None = None
    top_p: Fraction | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: (
        Annotated[dict[TokenKey, Bias], Field(max_length=1024, json_schema_extra={"additionalProperties": False})]
        | None
    ) = None
    user: Name | None = Field(default=None, description="Written to the log.")
    # Extensions of OpenAI's API:
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1), WHOLE_NUMBER] | None = Field(
        default=None, description="0 or -1: all tokens."
    )
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Fraction | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1), WHOLE_NUMBER] | None = None
    bad_words: Annotated[list[Stop], Field(max_length=64)] | None = None
    allowed_token_ids: Annotated[list[Token], Field(min_length=1, max_length=4096)] | None = None
    include_stop_str_in_output: bool | None = None
    beams: Annotated[int, Field(ge=1, le=16), WHOLE_NUMBER] | None = None
    length_penalty: Annotated[float, Field(ge=-100, le=100)] | None = None
    structured_outputs: StructuredOutputs | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31), WHOLE_NUMBER] | None = Field(
        default=None, description="Higher is scheduled first, 0 by default; needs --policy priority."
    )
    cache_salt: Name | None = Field(
        default=None, description="The prefix cache is shared only with requests of the same cache_salt."
    )
    cache_chunks: Annotated[list[GrammarText], Field(min_length=1, max_length=64)] | None = Field(
        default=None,
        description="Parts of the prompt, as they stand in it, such as documents: their keys and values are reused "
        "wherever they stand in later prompts of the same cache_salt; needs --chunk-cache.",
    )
    cache_chunk_share: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None,
        description="With cache_chunks: share of each part's tokens that is recomputed in its place, 0.25 by default; "
        "1 is exact.",
    )
    cache_chunk_lead: Annotated[int, Field(ge=0, le=1024), WHOLE_NUMBER] | None = Field(
        default=None,
        description="With cache_chunks: pages at the beginning of the prompt that the parts are computed behind, and "
        "found by, 1 by default; 0: alone.",
    )
    subtask_markers: Annotated[list[Stop], Field(min_length=2, max_length=2)] | None = Field(
        default=None,
        description="Texts that begin and end a subtask, best special tokens: what is generated between them leaves "
        "the KV cache once it is finished, and what follows is generated without it.",
    )
    subtasks_kept: Annotated[int, Field(ge=0, le=1024), WHOLE_NUMBER] | None = Field(
        default=None, description="With subtask_markers: finished subtasks that stay, the latest ones; 1 by default."
    )
    guided_json: Schema | None = Field(default=None, description="The same as structured_outputs.json.")
    guided_regex: GrammarText | None = Field(default=None, description="The same as structured_outputs.regex.")
    guided_choice: Choices | None = Field(default=None, description="The same as structured_outputs.choice.")
    guided_grammar: GrammarText | None = Field(default=None, description="The same as structured_outputs.grammar.")
    skip_special_tokens: bool | None = Field(
        default=None, description="False: the names of generated special tokens are part of the text; true by default."
    )
    spaces_between_special_tokens: bool | None = Field(
        default=None, description="No effect, as with transformers' fast tokenizers: none are put between any tokens."
    )
    truncate_prompt_tokens: Truncation | None = Field(
        default=None, description="Keep the last tokens of a longer prompt: so many, or for -1 as many as fit."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        default=None, description="With truncate_prompt_tokens: the end that is cut off; left by default."
    )
    return_token_ids: bool | None = Field(
        default=None, description="The response has the token ids of the prompt and of each completion."
    )
    prompt_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE_NUMBER] | None = Field(
        default=None,
        description="Log-probabilities of the prompt's tokens, with so many top tokens each; not streamed.",
    )
    add_special_tokens: bool | None = Field(
        default=None, description="Put the token that begins a document first; true by default for prompts, not chats."
    )
    parse_special: bool | None = Field(
        default=None,
        description="Names of special tokens are those tokens; true by default for prompts, false for chat messages.",
    )
