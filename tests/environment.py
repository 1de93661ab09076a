"""Environment of tests and proofs: eight simulated devices, the compilation cache, type checks, the seed.

Import this before anything that touches a JAX backend; importing it is enough.

    JAXLLM_SEED                 the seed; default: changes with every commit to the code or the tests
    JAXLLM_CACHE                programs that engines keep; default: .cache/jaxllm in the repository
    JAX_COMPILATION_CACHE_DIR   the persistent compilation cache; default: .cache/jax in the repository
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEVICES = 8
CHECKED = ("jaxllm", "pallas_kernels", "sharding")

# The type checker picks at random which item of a list it looks at, also where a Hypothesis strategy calls us.
TYPECHECK_RANDOM = "Do not use the `random` module inside strategies"

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
os.environ.setdefault("JAXLLM_CACHE", str(ROOT / ".cache" / "jaxllm"))
# Each worker has a core: threads of its own would make LAPACK's small decompositions wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Two test workers may both load libtpu, as the TPU compiler.
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax  # noqa: E402
from jaxtyping import install_import_hook  # noqa: E402

import tests.typecheck  # noqa: E402, F401  (the hook finds it by name)

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", DEVICES)
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)

install_import_hook(CHECKED, "tests.typecheck.check")


def of_code() -> int:
    """The seed when none is given: another whenever a commit changes the code or the tests.

    A commit that passed passes again, and elsewhere, and so does one that adds a page of documentation or a record to
    it: what is found by chance is found by whoever changes something, and not on another day.
    """
    trees = git("rev-parse", *(f"HEAD:{room}" for room in (*CHECKED, "recipes", "tests"))) or "no git"
    return int(hashlib.sha256(trees.encode()).hexdigest()[:6], 16)


def seed() -> int:
    """The seed of this process."""
    return int(os.environ.get("JAXLLM_SEED") or of_code())


def derive(*parts: object) -> int:
    """A 32-bit seed from anything printable: independent streams from one seed."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:4], "big")


def git(*arguments: str) -> str:
    """Output of a git command in the repository; empty where there is no git."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def take_cores(number: int, of: int) -> None:
    """Keeps this process to its share of the cores, the ``number``-th of ``of`` workers; Linux, with a core for each.

    The threads of eight simulated devices, and more so those of a simulated kernel, hand work and locks to each other:
    on cores that two workers share, the same tests take up to three times the processor's time.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= of:
        os.sched_setaffinity(0, cores[number % of :: of])  # a worker that replaces a lost one has a later number


def compile_fast() -> None:
    """Programs of this process are from here on compiled six times as fast, and run slower. Before a backend starts.

    For arithmetic on small numbers, where compiling is half of all time. HLO is optimised as ever, save for fusions,
    which are fewer: what is said of a compiled program is said of one compiled with ``AS_EVER``. Child processes
    inherit the part that is about CPUs alone.
    """
    if jax.__version_info__ < (0, 12) and _FAST not in os.environ.get("XLA_FLAGS", ""):  # XLA ends at unknown flags
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FAST}".strip()
    jax.config.update("jax_disable_most_optimizations", True)


AS_EVER = {"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 12) else {}
"""Compiler options, ``lowered.compile(AS_EVER)``, of CPU programs whose memory, FLOPs or text are looked at."""

_FAST = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"


def compiled_alike() -> dict[str, str]:
    """Environment variables of child processes whose results are compared bit for bit with this process's."""
    return {"JAX_DISABLE_MOST_OPTIMIZATIONS": str(int(jax.config.read("jax_disable_most_optimizations")))}


@contextlib.contextmanager
def optimized(enabled: bool = True) -> Iterator[None]:
    """Programs compiled inside the block have optimised machine code, as a user's have: for what runs long.

    Args:
        enabled: False in proofs of arithmetic on small numbers, which are processes without ``compile_fast``.
    """
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", not enabled)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


@contextlib.contextmanager
def x64(enabled: bool = True) -> Iterator[None]:
    """64-bit JAX inside the block."""
    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", enabled)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)
