"""Code sandbox: runs Python code in a process of its own, with limits and without network.

The process has an empty folder, bounded processor time, memory, output and file sizes, no network (a namespace of its
own where the system allows one), and an audit hook (PEP 578) that refuses sockets, other processes, native libraries,
and files outside its folder and Python's own library. This stops a policy's mistakes and its obvious tricks. It is no
boundary for an attacker: run untrusted models in a container besides.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile

SECONDS = 5.0
MEMORY = 512 * 2**20
OUTPUT = 8192

_BOOTSTRAP = r"""
import os, resource, sys, traceback
seconds, memory, folder = int(sys.argv[1]), int(sys.argv[2]), os.getcwd()
try:
    flags = 0x40000000  # CLONE_NEWNET
    if hasattr(os, "unshare"):
        unshare = os.unshare
    else:
        import ctypes
        def unshare(what, libc=ctypes.CDLL(None, use_errno=True)):
            if libc.unshare(what):
                raise OSError
    try:
        unshare(flags)
    except OSError:
        unshare(flags | 0x10000000)  # with a user namespace of its own
except Exception:
    pass  # the audit hook still refuses sockets
for what, limit in (("CPU", seconds), ("AS", memory), ("FSIZE", 2**20), ("NOFILE", 32), ("CORE", 0)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + what), (limit, limit))
program = sys.stdin.read()
readable = [os.path.realpath(one) for one in (folder, *filter(None, sys.path), os.path.dirname(os.__file__))]
refused = ("socket.", "subprocess.", "ctypes.", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.system",
           "os.kill", "os.startfile", "pty.", "os.putenv", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link",
           "os.symlink", "os.chmod", "os.chown", "os.truncate", "os.chflags", "shutil.", "syslog.", "fcntl.", "mmap.",
           "glob.", "sqlite3.", "os.utime", "os.setxattr", "sys.addaudithook", "resource.", "signal.")
modules = {"_socket", "socket", "_ctypes", "ctypes", "_posixsubprocess", "subprocess", "_multiprocessing",
           "multiprocessing", "_posixshmem", "_winapi", "asyncio"}
writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
def inside(path, places):
    path = os.path.realpath(path)
    return any(path == place or path.startswith(place + os.sep) for place in places)
def audit(event, arguments, inside=inside, readable=readable, refused=refused, modules=modules, writing=writing,
          folder=os.path.realpath(folder), fspath=os.fspath, fsdecode=os.fsdecode):
    if event == "open":
        path, _, flags = arguments
        if isinstance(path, int):
            return
        if not inside(fsdecode(path), [folder] if (flags or 0) & writing else readable):
            raise PermissionError("the sandbox has no access to " + fsdecode(path))
    elif event in ("os.listdir", "os.scandir"):
        path = arguments[0]
        if isinstance(path, int) or not inside(fsdecode("." if path is None else path), readable):
            raise PermissionError("the sandbox has no access to " + str(path))
    elif event == "import" and arguments[0].partition(".")[0] in modules:
        raise PermissionError("the sandbox has no module " + arguments[0])
    elif event.startswith(refused):
        raise PermissionError("the sandbox does not allow " + event)
for name in [name for name in sys.modules if name.partition(".")[0] in modules]:
    del sys.modules[name]
sys.argv = ["<code>"]
space = {"__name__": "__main__"}
sys.addaudithook(audit)
try:
    exec(compile(program, "<code>", "exec"), space)
except SystemExit:
    pass
except BaseException as error:
    print(traceback.format_exception_only(error)[-1].strip())
"""


def run_python(code: str, *, seconds: float = SECONDS, memory: int = MEMORY, output: int = OUTPUT) -> str:
    """Runs Python code in the sandbox.

    Args:
        code: a program; what it prints is the result.
        seconds: processor and wall time that it may take.
        memory: bytes of address space.
        output: characters of output that are kept.

    Returns:
        what it printed, then the exception where it failed, and a last line in brackets where it was stopped or its
        output was cut.
    """
    with tempfile.TemporaryDirectory(prefix="jaxllm-code-") as folder, tempfile.TemporaryFile() as out:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _BOOTSTRAP, str(max(1, round(seconds))), str(memory)],
            stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT, cwd=folder, start_new_session=True,
            env={"PATH": "", "HOME": folder, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        stopped = ""
        try:
            process.communicate(code.encode("utf-8", "replace"), timeout=seconds + 1)
        except subprocess.TimeoutExpired:
            stopped = f"[stopped after {seconds:g} s]"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode in (-signal.SIGXCPU, -signal.SIGKILL) and not stopped:
            stopped = f"[stopped after {seconds:g} s]"
        out.seek(0)
        text = out.read(4 * output).decode("utf-8", "replace")
    if len(text) > output:
        text, stopped = text[:output], stopped or "[cut]"
    return "\n".join(filter(None, (text.rstrip("\n"), stopped)))
