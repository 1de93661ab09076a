"""Signatures of stored executables: an executable is native code, so one that is not trusted is never opened.

A stored executable begins with an HMAC-SHA256 over its name and content, under a key that only this user can read, and
with a SHA-256 of its content. Only the first proves that this user compiled it. An executable that came with a
checkpoint has somebody else's signature: it is opened only where the user has said so, in files that nobody else can
change, see ``may_trust``. docs/decisions/0006-engine.md has the reasons.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
from pathlib import Path

from jaxllm.files import cache_root, sync

KEY_BYTES = 32
"""Bytes of the key that signs executables."""


def sealed(name: str, data: bytes) -> bytes:
    """Content of the file of an executable: signature, checksum, and the executable."""
    return _sign(name, data) + hashlib.sha256(data).digest() + data


def opened(path: Path, *, trusted: bool = False) -> bytes | None:
    """Executable of a file; None if it was not compiled by this user, or is damaged.

    Args:
        path: file that ``sealed`` made.
        trusted: take an executable of somebody else too, if ``may_trust`` allows its file.
    """
    content = path.read_bytes()
    signature, checksum, data = content[:32], content[32:64], content[64:]
    if hmac.compare_digest(signature, _sign(path.name, data)):
        return data
    if trusted and may_trust(path) and hmac.compare_digest(checksum, hashlib.sha256(data).digest()):
        return data
    return None


def may_trust(path: Path) -> bool:
    """Whether nobody but this user (and root) can change a file or put another in its place."""
    path = path.resolve()
    for one in (path, path.parent):
        held = one.stat()
        if held.st_uid not in (os.getuid(), 0) or held.st_mode & 0o022:
            return False
    return True


def _sign(name: str, data: bytes) -> bytes:
    return hmac.digest(signing_key(), name.encode() + b"\0" + data, "sha256")


def signing_key() -> bytes:
    """Signing key: random bytes that only this user can read; created on first use.

    Raises:
        PermissionError: others can read the key, or it is damaged.
    """
    path = cache_root("") / "engine.key"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        part.touch(mode=0o600)
        part.write_bytes(secrets.token_bytes(KEY_BYTES))
        sync(part)
        with contextlib.suppress(FileExistsError):
            os.link(part, path)  # another process may have been first
        part.unlink()
    held = path.stat()
    if held.st_uid != os.getuid() or held.st_mode & 0o077:
        raise PermissionError(
            f"{path} can be read by others than you, so its signatures prove nothing. Delete it; a new key is created."
        )
    key = path.read_bytes()
    if len(key) != KEY_BYTES:
        raise PermissionError(
            f"{path} has {len(key)} bytes instead of {KEY_BYTES}, so its signatures prove nothing. Delete it; a new "
            "key is created."
        )
    return key
