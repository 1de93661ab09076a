"""Routes of the Files and Batch APIs: upload a file of requests, create a batch of it, read output and error file."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal

from fastapi import FastAPI, File, Form, Path, Query, Request, UploadFile
from starlette.responses import FileResponse, Response

from jaxllm.serve.api.errors import ApiError
from jaxllm.serve.api.route_support import RequestService, errors, json_response
from jaxllm.serve.batches.batch_manager import BatchManager
from jaxllm.serve.batches.batch_objects import (
    BatchList,
    BatchObject,
    BatchRequest,
    DeletedFile,
    FileList,
    FileObject,
)
from jaxllm.serve.responses.response_store import ResponseStore

FileId = Annotated[str, Path(pattern=r"^file-[0-9a-f]{24,26}$")]
BatchId = Annotated[str, Path(pattern=r"^batch_[0-9a-f]{24}$")]
After = Annotated[str | None, Query(max_length=128)]
_JSON_LINES: dict[int | str, Any] = {200: {"content": {"application/jsonl": {"schema": {"type": "string"}}}}}


def add_batch_routes(app: FastAPI, service: RequestService, store: ResponseStore) -> None:
    """Adds the routes to an application; without ``batch_dir`` they refuse every request and are not published."""
    folder = service.config.batch_dir
    published = folder is not None
    opened: list[BatchManager] = []

    def manager() -> BatchManager:
        if folder is None:
            message = "this server keeps no files and batches; start it with --batch-dir DIR."
            raise ApiError(403, message, code="batches_off")
        service.ready()
        if not opened:
            raise ApiError(503, "the batches are still being read; try again later.", code="not_ready")
        return opened[0]

    async def open_manager() -> None:
        assert folder is not None
        opened.append(BatchManager(service, FilePath(folder), store))

    async def close_manager() -> None:
        while opened:
            await opened.pop().close()

    if folder is not None:
        service.when_open.append(open_manager)
        service.when_closing.append(close_manager)

    @app.post("/v1/files", response_model=FileObject, responses=errors(403, 408, 503), include_in_schema=published)
    async def upload_file(
        request: Request, file: Annotated[UploadFile, File()], purpose: Annotated[Literal["batch"], Form()]
    ) -> Response:
        """Uploads a JSON lines file of requests for a batch."""
        files = manager().files
        form = await request.form()
        if unknown := [name for name in form if name not in ("file", "purpose")]:
            raise ApiError(400, f"there is no field {unknown[0][:100]!r}.", param=unknown[0][:100])
        name, content = f"file-{secrets.token_hex(12)}", await file.read()
        filename = (file.filename or "upload.jsonl")[:256]
        return json_response(await asyncio.to_thread(files.add, name, filename, purpose, [content]))

    @app.get("/v1/files", response_model=FileList, responses=errors(403, 503), include_in_schema=published)
    async def list_files(
        after: After = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
        order: Literal["asc", "desc"] = "desc",
        purpose: Annotated[str | None, Query(max_length=64)] = None,
    ) -> Response:
        """List of files, newest first by default."""
        found = await asyncio.to_thread(manager().files.list)
        found = [one for one in found if purpose in (None, one["purpose"])]
        return _page(found if order == "asc" else found[::-1], after, limit)

    @app.get(
        "/v1/files/{file_id}", response_model=FileObject, responses=errors(403, 404, 503), include_in_schema=published
    )
    async def retrieve_file(file_id: FileId) -> Response:
        """File object."""
        return json_response(manager().files.get(file_id, "file_id"))

    @app.delete(
        "/v1/files/{file_id}", response_model=DeletedFile, responses=errors(403, 404, 503), include_in_schema=published
    )
    async def delete_file(file_id: FileId) -> Response:
        """Deletes a file; batches of it go on."""
        await asyncio.to_thread(manager().files.delete, file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})

    @app.get(
        "/v1/files/{file_id}/content", response_class=FileResponse, responses={**_JSON_LINES, **errors(403, 404, 503)},
        include_in_schema=published,
    )  # fmt: skip
    async def file_content(file_id: FileId) -> Response:
        """Contents of a file."""
        return FileResponse(manager().files.content(file_id, "file_id"), media_type="application/jsonl")

    @app.post("/v1/batches", response_model=BatchObject, responses=errors(403, 404, 503), include_in_schema=published)
    async def create_batch(body: BatchRequest) -> Response:
        """Creates a batch: every line of a file is answered, or has its error, within 24 hours."""
        head = {name: getattr(body, name) for name in ("input_file_id", "endpoint", "completion_window", "metadata")}
        batch = await asyncio.to_thread(manager().create, head)
        manager().notify()
        return json_response(batch.body())

    @app.get("/v1/batches", response_model=BatchList, responses=errors(403, 503), include_in_schema=published)
    async def list_batches(after: After = None, limit: Annotated[int, Query(ge=1, le=100)] = 20) -> Response:
        """List of batches, newest first."""
        return _page([batch.body() for batch in reversed(manager().list())], after, limit)

    @app.get(
        "/v1/batches/{batch_id}", response_model=BatchObject, responses=errors(403, 404, 503),
        include_in_schema=published,
    )  # fmt: skip
    async def retrieve_batch(batch_id: BatchId) -> Response:
        """Batch object."""
        return json_response(manager().get(batch_id).body())

    @app.post(
        "/v1/batches/{batch_id}/cancel", response_model=BatchObject, responses=errors(403, 404, 503),
        include_in_schema=published,
    )  # fmt: skip
    async def cancel_batch(batch_id: BatchId) -> Response:
        """Cancels a batch; what is answered is in its files."""
        return json_response((await manager().cancel(batch_id)).body())


def _page(found: list[dict[str, Any]], after: str | None, limit: int) -> Response:
    """One page of a list.

    Raises:
        ApiError: ``after`` is none of its ids.
    """
    if after is not None:
        names = [one["id"] for one in found]
        if after not in names:
            raise ApiError(400, f"there is no {after[:100]!r} in this list.", param="after")
        found = found[names.index(after) + 1 :]
    page = found[:limit]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return json_response({"object": "list", "data": page, **ends, "has_more": len(found) > limit})
