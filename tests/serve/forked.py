"""Stub servers in forked processes: ``python -m tests.serve.forked SECONDS``, so that a start costs no imports.

For each line of the input, a folder of batches, it forks a server and prints "PID"; the server prints "PID PORT".
"""

from __future__ import annotations

import os
import signal
import sys

from tests.serve.alone import serve_stub


def main() -> None:
    """Forks servers until the input ends. JAX has no backend and no thread yet, so that forking is safe."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # killed servers need not be waited for
    for line in sys.stdin:
        if (made := os.fork()) == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            serve_stub(float(sys.argv[1]), f"{os.getpid()} ", 8, line.strip())
            os._exit(0)
        print(made, flush=True)


if __name__ == "__main__":
    main()
