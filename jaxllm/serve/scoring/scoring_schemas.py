"""Schemas of the scoring routes: requests as vLLM, Jina and Cohere have them, and responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from jaxllm.serve.api.request_fields import Count, Name, RequestModel, UnsupportedField
from jaxllm.serve.api.request_schemas import Prompts
from jaxllm.serve.api.response_schemas import EmbeddingUsage, ResponseModel

MOST_TEXTS = 1024
Texts = Annotated[list[str], Field(min_length=1, max_length=MOST_TEXTS)]
_WHOLE = "texts are read whole"


class ScoreRequest(RequestModel):
    """Body of `POST /score`: one text against one or several, or as many against as many."""

    model: Name
    text_1: str | Texts
    text_2: str | Texts
    user: Name | None = Field(default=None, description="Written to the log.")
    truncate_prompt_tokens: Annotated[Any, UnsupportedField(_WHOLE)] = None


class RerankDocument(RequestModel):
    """Document as an object."""

    text: str


class RerankRequest(RequestModel):
    """Body of `POST /rerank`: documents that are sorted by their relevance to a query."""

    model: Name
    query: str
    documents: Annotated[list[str | RerankDocument], Field(min_length=1, max_length=MOST_TEXTS)]
    top_n: Count | None = Field(default=None, description="Number of results; all by default.")
    return_documents: bool | None = Field(default=None, description="The results have the documents; true by default.")
    user: Name | None = Field(default=None, description="Written to the log.")
    rank_fields: Annotated[Any, UnsupportedField("documents are texts", ["text"])] = None
    max_chunks_per_doc: Annotated[Any, UnsupportedField(_WHOLE)] = None
    max_tokens_per_doc: Annotated[Any, UnsupportedField(_WHOLE)] = None
    truncate_prompt_tokens: Annotated[Any, UnsupportedField(_WHOLE)] = None


class PoolingRequest(RequestModel):
    """Body of `POST /pooling` and of `POST /classify`."""

    model: Name
    input: Prompts
    user: Name | None = Field(default=None, description="Written to the log.")
    truncate_prompt_tokens: Annotated[Any, UnsupportedField(_WHOLE)] = None


class ScoreObject(ResponseModel):
    """Score of one pair."""

    index: int
    object: Literal["score"]
    score: float


class Scores(ResponseModel):
    """Response of `POST /score`."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreObject]
    usage: EmbeddingUsage


class RerankResult(ResponseModel):
    """Document of a reranking: its place in the request and its relevance."""

    index: int
    relevance_score: float
    document: RerankDocument | None = None


class Reranking(ResponseModel):
    """Response of `POST /rerank`: the most relevant documents first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: EmbeddingUsage


class PooledObject(ResponseModel):
    """Pooled output of one text: an embedding, or the reward alone."""

    index: int
    object: Literal["pooling"]
    data: list[float]


class Pooled(ResponseModel):
    """Response of `POST /pooling`."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PooledObject]
    usage: EmbeddingUsage


class ClassObject(ResponseModel):
    """Classes of one text; a reward model has one, whose probability is the sigmoid of the reward."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classes(ResponseModel):
    """Response of `POST /classify`."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ClassObject]
    usage: EmbeddingUsage
