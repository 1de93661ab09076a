"""The folder that holds a run's checkpoints: names, the writer's lock, commit, dead leftovers.

step_00000300/             a complete checkpoint: it has a manifest
saving_00000400/           being written; dead if no process holds the lock
deleting_00000100/         on its way out: retention renames before it deletes
corrupt_00000200/          found damaged and set aside by `resume` or `latest_good`; never deleted
aside_00000500/            set aside by `set_aside_after`; never deleted
.lock                      held by the one process that saves here

Where folders can be renamed, a checkpoint gets its name by one rename, with the manifest inside. In an object store it
is written under its own name, the manifest last; it is deleted and set aside by taking the manifest first. There is no
lock there: two runs must not save into one place.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import threading
from collections.abc import Iterable

from jaxllm.checkpoint.errors import CheckpointBusyError
from jaxllm.checkpoint.storage import checkpoint_manifest as manifest_lib
from jaxllm.checkpoint.storage.file_systems import FileSystem, LocalFiles, open_files
from jaxllm.files import make_directory

_STEP = re.compile(r"step_(\d{8,})")
_DEAD = re.compile(r"(saving|deleting)_\d{8,}")

# POSIX locks do not exclude a second writer of the same process; this does.
_open_here: set[str] = set()
_open_here_guard = threading.Lock()


class StepDirectories:
    """Step directories below one root: names and atomic renames. Nothing is created until `acquire`.

    Attributes:
        files: file system of the root.
    """

    def __init__(self, root: str | os.PathLike | FileSystem):
        self.files = open_files(root)
        self._lock: int | None = None
        self._held = False

    def __str__(self) -> str:
        return str(self.files)

    def steps(self) -> list[int]:
        """Steps of complete checkpoints, ascending. Safe while another process saves and deletes here."""
        found = []
        for name in self.files.names():
            match = _STEP.fullmatch(name)
            if match and self._is_committed(name):
                found.append(int(match.group(1)))
        return sorted(found)

    def folder(self, step: int, state: str = "step") -> str:
        """The name of a checkpoint's folder."""
        return f"{state}_{step:08d}"

    def saving_folder(self, step: int) -> str:
        """The name of the folder that a checkpoint is written in."""
        return self.folder(step, "saving" if self.files.renames else "step")

    def acquire(self) -> None:
        """Creates the directory, takes the writer's lock and deletes what dead writers left.

        The lock belongs to the process (POSIX record lock): kill -9 frees it, and children of a fork do not hold it.

        Raises:
            CheckpointBusyError: another process, or another Checkpointer of this one, writes here.
        """
        if isinstance(self.files, LocalFiles):
            make_directory(self.files.path)
        else:
            self.files.make("")
        with _open_here_guard:
            if str(self) in _open_here:
                raise CheckpointBusyError(
                    f"{self} is already open for saving in this process: close that Checkpointer first "
                    "(or open this one with read_only=True)."
                )
            if isinstance(self.files, LocalFiles):
                self._lock = _lock(self.files)
            _open_here.add(str(self))
            self._held = True
        for name in self.files.names():
            if _DEAD.fullmatch(name) or (_STEP.fullmatch(name) and not self._is_committed(name)):
                self.files.remove(name)

    def release(self) -> None:
        """Releases the writer's lock, if it is held."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if self._held:
            self._held = False
            with _open_here_guard:
                _open_here.discard(str(self))

    def begin_save(self, step: int) -> str:
        """Creates a fresh folder to write a checkpoint into and returns its name."""
        name = self.saving_folder(step)
        self.files.remove(name)
        self.files.make(name)
        return name

    def commit(self, step: int, names: Iterable[str]) -> None:
        """Commits a saved folder as the checkpoint of `step`, in one rename that survives a power cut.

        Args:
            names: files in it that hold no array data; the others are on disk already.
        """
        if not self.files.renames:
            return  # its manifest, which is there, has made it one
        saving = self.saving_folder(step)
        files = {f"{saving}/{name}" for name in names}
        folders = {name.rsplit("/", 1)[0] for name in files}
        self.files.sync(sorted({*files, *folders, saving}))
        self.files.rename(saving, self.folder(step))
        self.files.sync([""])

    def abandon(self, step: int) -> None:
        """Removes the folder of `begin_save` as far as possible."""
        with contextlib.suppress(OSError):
            self.files.remove(self.saving_folder(step))

    def delete(self, step: int) -> None:
        """Deletes a checkpoint; if killed half-way it is a leftover, never half a checkpoint."""
        doomed = self.folder(step)
        if self.files.renames:
            doomed = self.folder(step, "deleting")
            self.files.rename(self.folder(step), doomed)
            self.files.sync([""])  # or else a power cut may undo the rename and keep the deletions
        else:
            self.files.remove(f"{doomed}/{manifest_lib.NAME}")
        self.files.remove(doomed)

    def set_aside(self, step: int, state: str) -> str:
        """Renames a checkpoint out of the way, to `<state>_<step>`, and returns the new name."""
        source, target = self.folder(step), self.folder(step, state)
        taken, attempt = set(self.files.names()), 1
        while target in taken:
            attempt += 1
            target = f"{self.folder(step, state)}_{attempt}"
        if not self.files.renames:
            self.files.rename(f"{source}/{manifest_lib.NAME}", f"{target}/{manifest_lib.NAME}")
            for name in self.files.walk(source):
                self.files.rename(f"{source}/{name}", f"{target}/{name}")
        else:
            self.files.rename(source, target)
        return target

    def set_aside_folders(self) -> list[str]:
        """Folders that no command reads: set aside, or found damaged."""
        return [name for name in self.files.names() if re.fullmatch(r"(corrupt|aside)_\d{8,}(_\d+)?", name)]

    def _is_committed(self, name: str) -> bool:
        return self.files.size(f"{name}/{manifest_lib.NAME}") is not None


def _lock(files: LocalFiles) -> int:
    """File handle that holds the lock; the file names its holder."""
    handle = os.open(files.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        owner = os.read(handle, 200).decode(errors="replace").strip()
        os.close(handle)
        raise CheckpointBusyError(
            f"{files} is being written by another process ({owner or 'unknown'}): stop it, use another "
            "directory, or open this one with read_only=True."
        ) from error
    except OSError:
        # A file system without locks (some network mounts): saving still works, only unguarded.
        pass
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return handle
