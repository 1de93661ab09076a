"""File store: uploaded and generated files of `/v1/files`, each a directory with its contents and metadata."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxllm.files import make_directory, new_directory, read_json, write_json
from jaxllm.serve.api.errors import ApiError

_ID = re.compile(r"file-[0-9a-f]{24,26}\Z")
_CONTENT, _METADATA = "content", "metadata.json"


class FileStore:
    """Files in a directory. A file appears as a whole, and is on disk once it has its name.

    Args:
        folder: directory of the files; it is created if there is none.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        make_directory(folder)

    def add(self, name: str, filename: str, purpose: str, parts: Iterable[bytes]) -> dict[str, Any]:
        """Adds a file, unless there is one with this id; returns its file object."""
        if not (self._folder / name).exists():
            with new_directory(self._folder / name) as folder:
                with (folder / _CONTENT).open("wb") as file:
                    for part in parts:
                        file.write(part)
                size = (folder / _CONTENT).stat().st_size
                body = {"id": name, "object": "file", "bytes": size, "created_at": int(time.time())}
                body |= {"filename": filename, "purpose": purpose, "status": "processed", "expires_at": None}
                write_json(folder / _METADATA, body)
        return self.get(name)

    def get(self, name: str, param: str | None = None) -> dict[str, Any]:
        """File object.

        Raises:
            ApiError: 404; there is no such file. ``param`` is the request field that names it.
        """
        if not _ID.match(name) or not (self._folder / name / _METADATA).exists():
            raise ApiError(404, f"there is no file {name[:100]!r}.", param=param, code="file_not_found")
        return read_json(self._folder / name / _METADATA)

    def content(self, name: str, param: str | None = None) -> Path:
        """Path of a file's contents.

        Raises:
            ApiError: 404; there is no such file.
        """
        self.get(name, param)
        return self._folder / name / _CONTENT

    def list(self) -> list[dict[str, Any]]:
        """All file objects, oldest first."""
        names = [folder.name for folder in self._folder.iterdir() if _ID.match(folder.name)]
        return sorted((self.get(name) for name in names), key=lambda one: (one["created_at"], one["id"]))

    def delete(self, name: str) -> None:
        """Deletes a file; batches that read it have a copy.

        Raises:
            ApiError: 404; there is no such file.
        """
        self.get(name)
        folder = self._folder / name
        (folder / _METADATA).unlink(missing_ok=True)  # without it the file is no more, whatever happens now
        shutil.rmtree(folder, ignore_errors=True)
