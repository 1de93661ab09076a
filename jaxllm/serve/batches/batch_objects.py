"""Schemas of the Files and Batch APIs: the request that creates a batch, and the responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from jaxllm.serve.api.request_fields import RequestModel, UnsupportedField
from jaxllm.serve.api.response_schemas import ResponseModel
from jaxllm.serve.responses.response_requests import Metadata


class BatchRequest(RequestModel):
    """Body of `POST /v1/batches`."""

    input_file_id: Annotated[str, Field(pattern=r"^file-[0-9a-f]{24,26}$")]
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: Annotated[Any, UnsupportedField("files stay until they are deleted")] = None


class FileObject(ResponseModel):
    """File of `/v1/files`."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    expires_at: None


class FileList(ResponseModel):
    """Response of `GET /v1/files`."""

    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(ResponseModel):
    """Response of `DELETE /v1/files/ID`."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchCounts(ResponseModel):
    """Numbers of a batch's requests."""

    total: int
    completed: int
    failed: int


class BatchObject(ResponseModel):
    """Batch of `/v1/batches`."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: None
    input_file_id: str
    completion_window: Literal["24h"]
    status: Literal["validating", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    metadata: dict[str, str] | None


class BatchList(ResponseModel):
    """Response of `GET /v1/batches`."""

    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
