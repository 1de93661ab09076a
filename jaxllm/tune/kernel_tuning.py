"""Tuning of the block sizes of Pallas kernels: legal blocks by the solver, trials by the search, the fastest stored.

A trial is measured on the device at hand: the kernel is compared with its plain JAX implementation, then timed. Without
a TPU it is compiled ahead of time for one, and its cost is the compiler's own estimate of cycles. What is faster than
the present blocks is stored in ``pallas_kernels/tuned`` by device kind and case (shape, dtype).

Legend: B batch, S sequence, N query heads, K kv heads, H head dim; M rows, E groups.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jaxllm.tune import timing
from jaxllm.tune.block_solver import BlockProblem, SumLimit
from jaxllm.tune.trial_search import search
from pallas_kernels import tuned
from pallas_kernels.flash_attention import config as flash_config
from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.grouped_matmul import config as grouped_config
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.recurrent import CELLS, recurrent
from pallas_kernels.recurrent import config as recurrent_config
from sharding.topology import Topology

ERROR = 2e-2
"""Relative error of results and gradients that rounding to bfloat16 explains."""
REPEATS = 10
GPU_FORWARD = ("q", "kv", "warps", "stages")
"""Fields of flash attention's forward pass on a GPU: the block of a program, that of its loop, and how it runs."""
SMALL_VMEM, SHARED_MEMORY = 16 * 2**20, 227 * 2**10
"""Bytes: VMEM of a kernel by the TPU compiler's default, and shared memory of one program on an H100."""

Function = Callable[..., Array]


@dataclass(frozen=True)
class TuningPart:
    """Fields of block sizes that are tuned together.

    Attributes:
        problem: candidates of the fields and the limits that they must fit.
        backward: whether the gradients are timed as well.
    """

    problem: BlockProblem
    backward: bool


@dataclass(frozen=True)
class TuningCase:
    """Kernel on one shape, whose block sizes are tuned.

    Attributes:
        operation, case: where the blocks are stored (``pallas_kernels.tuned``).
        default: present blocks, a dataclass.
        parts: fields to tune, one part after the other.
        run: ``(implementation, *arrays) -> result``.
        arrays: makes the arguments from an RNG key, the differentiated ones first.
        differentiated: number of differentiated arguments.
    """

    operation: str
    case: str
    default: Any
    parts: tuple[TuningPart, ...]
    run: Function
    arrays: Callable[[Array], tuple[Array, ...]]
    differentiated: int


def flash_cases(platform: str, kind: str) -> Iterator[TuningCase]:
    """Flash attention in bfloat16: on a TPU both passes share blocks; on a GPU each has its own, by head dim."""
    for head_dim, (b, s, n, k) in {64: (2, 8192, 32, 8), 128: (2, 8192, 32, 8), 256: (1, 8192, 16, 8)}.items():

        def arrays(key: Array, shape: Any = (b, s, n, k, head_dim)) -> tuple[Array, ...]:
            b, s, n, k, h = shape
            keys = jax.random.split(key, 3)
            return tuple(
                jax.random.normal(one, (b, s, heads, h), jnp.bfloat16)
                for one, heads in zip(keys, (n, k, k), strict=True)
            )

        def run(implementation: str, q: Array, k: Array, v: Array) -> Array:
            return flash_attention(q, k, v, implementation=implementation)

        if platform == "gpu":
            default, case = flash_config.gpu_blocks(kind, head_dim, 2), flash_config.gpu_case(head_dim, 2)
            parts = (_flash_gpu(head_dim, backward=False), _flash_gpu(head_dim, backward=True))
        elif head_dim == 128:
            default, case = flash_config.tpu_blocks(kind, 2), flash_config.tpu_case(2)
            parts = (_flash_tpu(head_dim, default.vmem_bytes or SMALL_VMEM),)
        else:
            continue  # the blocks of a TPU do not depend on the head dim
        yield TuningCase("flash_attention", case, default, parts, run, arrays, 3)


def _flash_tpu(head_dim: int, vmem_bytes: int) -> TuningPart:
    """Both passes hold queries, keys, values and their gradients twice (double buffering), and two blocks of scores."""
    terms = ((2 * 2 * 3 * head_dim, ("rows",)), (2 * 2 * 3 * head_dim, ("kv",)), (2 * 4.0, ("rows", "kv")))
    domains = {"rows": (256, 512, 1024, 2048, 4096), "kv": (128, 256, 512, 1024, 2048)}
    return TuningPart(BlockProblem(domains, (SumLimit(terms, vmem_bytes, "bytes of VMEM"),)), True)


def _flash_gpu(head_dim: int, backward: bool) -> TuningPart:
    """A program has its own block, and those of each stage of the software pipeline, in shared memory: queries and then
    keys and values; backward two arrays of each, and two results.
    """
    own, inner, warps, stages = ("own_back", "inner_back", "warps_back", "stages_back") if backward else GPU_FORWARD
    domains = {own: (32, 64, 128, 256), inner: (32, 64, 128, 256), warps: (4, 8), stages: (1, 2, 3, 4)}
    held = 2 if backward else 1
    shared = (2 * held * head_dim, (own,)), (2 * 2 * head_dim, (inner, stages))
    registers = (1.0, (own, inner)), (float(held * head_dim), (own,))
    limits = (
        SumLimit(shared, SHARED_MEMORY, "bytes of shared memory"),
        SumLimit(registers, 2**16, "float32 registers of scores and results"),
    )
    return TuningPart(BlockProblem(domains, limits), backward)


def grouped_cases(platform: str, kind: str) -> Iterator[TuningCase]:
    """Grouped matmul in bfloat16: on a TPU by shape; on a GPU one shape stands for all."""
    shapes = {"Mixtral-8x7B": (16384, 8, 4096, 14336), "Qwen3-30B-A3B": (8192, 128, 2048, 768)}
    for m, e, inner, columns in shapes.values():

        def arrays(key: Array, shape: Any = (m, e, inner, columns)) -> tuple[Array, ...]:
            m, e, inner, columns = shape
            keys = jax.random.split(key)
            return (
                jax.random.normal(keys[0], (m, inner), jnp.bfloat16),
                jax.random.normal(keys[1], (e, inner, columns), jnp.bfloat16),
                jnp.full((e,), m // e, jnp.int32),
            )

        def run(implementation: str, lhs: Array, rhs: Array, sizes: Array) -> Array:
            return grouped_matmul(lhs, rhs, sizes, implementation=implementation)

        if platform == "gpu":
            yield TuningCase(
                "grouped_matmul", "all", grouped_config.gpu_tiles(kind, m, e, 2), _grouped_gpu(), run, arrays, 2
            )
            return
        default = grouped_config.matmul_tiles(kind, m, e, inner, columns, 2)
        case = grouped_config.shape_case(m, e, inner, columns, 2)
        part = _grouped_tpu(m, inner, columns, grouped_config.tpu_limits(kind).tiles_bytes)
        yield TuningCase("grouped_matmul", case, default, (part,), run, arrays, 0)


def _grouped_tpu(m: int, inner: int, columns: int, tiles_bytes: int) -> TuningPart:
    """Operands and results are held twice (double buffering), partial sums in float32 once."""
    sizes = lambda most: (*(n for n in (128, 256, 512, 1024, 2048, 4096) if n < most), most)  # noqa: E731
    rows = tuple(n for n in (128, 256, 512, 1024) if n <= m)
    held = (
        (2 * 2.0, ("rows", "inner")),
        (2 * 2.0, ("inner", "columns")),
        (2 * 2.0 + 4, ("rows", "columns")),
    )
    work = SumLimit(((1.0, ("rows", "inner", "columns")),), grouped_config.MAX_STEP_MACS, "work of a grid step")
    domains = {"rows": rows, "inner": sizes(inner), "columns": sizes(columns)}
    return TuningPart(BlockProblem(domains, (SumLimit(held, tiles_bytes, "bytes of VMEM"), work)), False)


def _grouped_gpu() -> tuple[TuningPart, ...]:
    """Operands of each stage of the software pipeline are in shared memory, the result in registers."""
    sizes = (32, 64, 128, 256)

    def part(a: str, b: str, c: str, backward: bool) -> TuningPart:
        domains: dict[str, tuple[int, ...]] = {a: sizes, b: sizes, c: sizes}
        stages: tuple[str, ...] = ()
        if not backward:
            domains, stages = domains | {"warps": (4, 8), "stages": (2, 3, 4)}, ("stages",)
        summed, (left, right) = (a, (b, c)) if backward else (b, (a, c))
        shared = SumLimit(
            ((2.0, (left, summed, *stages)), (2.0, (summed, right, *stages))), SHARED_MEMORY, "bytes of shared memory"
        )
        registers = SumLimit(((1.0, (left, right)),), 2**15, "float32 registers of the result")
        return TuningPart(BlockProblem(domains, (shared, registers)), backward)

    return part("rows", "inner", "columns", False), part("rows_back", "left_back", "columns_back", True)


def recurrent_cases(platform: str, kind: str) -> Iterator[TuningCase]:
    """Head-wise recurrent networks in bfloat16, on a TPU: by cell and head dim. A program of a GPU has the fewest rows
    that a matmul instruction takes, and one token at a time: there is nothing to tune.
    """
    if platform == "gpu":
        return
    rows, tokens, heads = 128, 1024, 4
    for cell, kind_of_cell in CELLS.items():
        for head_dim in (128, 256):

            def arrays(key: Array, gates: int = len(kind_of_cell.gates), h: int = head_dim) -> tuple[Array, ...]:
                keys = jax.random.split(key)
                return (
                    jax.random.normal(keys[0], (rows, tokens, heads, gates, h), jnp.bfloat16),
                    jax.random.normal(keys[1], (heads, gates, h, h), jnp.bfloat16) * h**-0.5,
                )

            def run(implementation: str, x: Array, matrices: Array, cell: Any = cell) -> Array:
                return recurrent(x, matrices, cell=cell, implementation=implementation)[0]

            default = recurrent_config.tpu_blocks(cell, rows, tokens, head_dim, 2)
            each, matrices = recurrent_config.vmem_terms(cell, head_dim, 2)
            held = SumLimit(((each, ("rows", "tokens")), (matrices, ())), recurrent_config.VMEM_BYTES, "bytes of VMEM")
            domains = {"rows": (16, 32, 64, 128), "tokens": tuple(1 << i for i in range(9))}
            part = TuningPart(BlockProblem(domains, (held,)), True)
            case = recurrent_config.tpu_case(cell, head_dim, 2)
            yield TuningCase("recurrent", case, default, (part,), run, arrays, 2)


CASES: dict[str, Callable[[str, str], Iterator[TuningCase]]] = {
    "flash_attention": flash_cases,
    "grouped_matmul": grouped_cases,
    "recurrent": recurrent_cases,
}
"""Operation -> ``(platform, device kind) -> its cases``. Other kernels' blocks follow from limits by their config."""


class TunedCase(NamedTuple):
    """Result of tuning a case.

    Attributes:
        operation, case: of the case.
        fields: fields in which the fastest blocks differ from the present ones; empty where these are the fastest.
        before, after: cost of the present blocks, and of the fastest, in the last part; None where they fail.
        trials, candidates: candidates measured, and legal ones.
        unit: of the costs, "s" or "cycles".
    """

    operation: str
    case: str
    fields: dict[str, int]
    before: float | None
    after: float | None
    trials: int
    candidates: int
    unit: str


Cost = Callable[[TuningCase, Mapping[str, int], bool], float | None]
"""(case, fields, backward) -> cost; None for blocks that do not compile or give wrong values."""


def tune_case(case: TuningCase, cost: Cost, trials: int, seed: int = 0, unit: str = "s") -> TunedCase:
    """Searches each part of a case for the blocks of least cost.

    Args:
        case: the kernel and shape.
        cost: measures a trial.
        trials: candidates to measure in each part.
        seed: of the search.
        unit: of the costs.

    Raises:
        ValueError: no candidate fits the limits; says which are broken.
    """
    default = dataclasses.asdict(case.default)
    changed: dict[str, int] = {}
    trials_taken = candidates = 0
    before = after = None
    for part in case.parts:
        legal = list(part.problem.solutions())
        if not legal:
            raise ValueError(f"{case.operation}, {case.case}: no block sizes are legal: {part.problem.why_empty()}.")
        present = {name: default[name] for name in part.problem.domains}
        legal = [present, *(one for one in legal if one != present)]
        tried = [changed | one for one in legal]
        found = search(
            [list(one.values()) for one in legal],
            lambda i, tried=tried, part=part: cost(case, tried[i], part.backward),
            trials,
            seed=seed,
            first=(0,),
        )
        costs = dict(found.trials)
        best = 0 if found.best is None else found.best
        before, after = costs[0], costs[best]
        trials_taken, candidates = trials_taken + len(costs), candidates + len(legal)
        changed = changed | {name: value for name, value in legal[best].items() if value != default[name]}
    return TunedCase(case.operation, case.case, changed, before, after, trials_taken, candidates, unit)


def device_cost() -> Cost:
    """Cost by seconds on the device at hand, of kernels whose values agree with plain JAX."""
    known: dict[tuple[str, bool], tuple[Any, Any]] = {}

    def cost(case: TuningCase, fields: Mapping[str, int], backward: bool) -> float | None:
        if (at := (case.case, backward)) not in known:
            arrays = case.arrays(jax.random.key(0))
            known[at] = arrays, jax.device_get(_pass(case, "xla", backward)(*arrays))
        arrays, want = known[at]
        function = _pass(case, f"pallas_{jax.default_backend()}", backward)
        try:
            with tuned.trial_fields(case.operation, fields):
                got = jax.device_get(function(*arrays))  # traced here, under the trial
        except Exception:  # compilers refuse blocks in many ways; such a candidate is out
            return None
        if not timing.difference(jax.tree.leaves(got), jax.tree.leaves(want)) <= ERROR:
            return None
        return timing.seconds(function, arrays, REPEATS)

    return cost


def compiler_cost(topology: Topology) -> Cost:
    """Cost by the TPU compiler's estimate of cycles of one device, in a process that compiles for the topology."""
    from jaxllm.compiler import aot

    count = topology.num_devices
    mesh = jax.make_mesh((count,), ("data",), axis_types=(AxisType.Explicit,), devices=topology.devices())

    def cost(case: TuningCase, fields: Mapping[str, int], backward: bool) -> float | None:
        shapes = jax.eval_shape(case.arrays, jax.random.key(0))
        arguments = [_replicated(x, mesh) for x in shapes]
        local = jax.shard_map(
            _pass(case, "pallas_tpu", backward), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
        )
        try:
            with tuned.trial_fields(case.operation, fields):
                return aot.compile(jax.jit(local), *arguments, topology=topology, mesh=mesh).cycles
        except Exception:  # as on a device
            return None

    return cost


def _replicated(x: jax.ShapeDtypeStruct, mesh: Mesh) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P()))


def _pass(case: TuningCase, implementation: str, backward: bool) -> Any:
    """Jitted result of a case, with its gradients where ``backward``."""

    def forward(*arrays: Array) -> Array:
        return case.run(implementation, *arrays)

    def both(*arrays: Array) -> Any:
        first, rest = arrays[: case.differentiated], arrays[case.differentiated :]
        out, pull = jax.vjp(lambda *first: forward(*first, *rest), *first)
        return out, *pull(jax.random.normal(jax.random.key(1), out.shape, out.dtype))

    return jax.jit(both if backward and case.differentiated else forward)


def tune_on(topology: Topology, operation: str, trials: int, seed: int) -> list[TunedCase]:
    """Tunes an operation by the compiler's cycles; a target of ``sharding.isolate.run_isolated``."""
    cost = compiler_cost(topology)
    cases = CASES[operation](topology.platform, topology.device_kind)
    return [tune_case(case, cost, trials, seed, "cycles") for case in cases]


def tune_here(operation: str, trials: int, seed: int) -> list[TunedCase]:
    """Tunes an operation on the device at hand."""
    cases = CASES[operation](jax.default_backend(), jax.devices()[0].device_kind)
    cost = device_cost()
    return [tune_case(case, cost, trials, seed) for case in cases]


def store(kind: str, command: str, found: list[TunedCase], version: str = jax.__version__) -> None:
    """Writes the fastest blocks to the device kind's file, beside those of other operations and cases.

    Args:
        kind: device kind.
        command: command that found them.
        found: results of one operation; cases whose present blocks are the fastest are left out.
        version: of the jax that measured them.
    """
    file = tuned.path(kind)
    data = tuned.read(file) if file.exists() else {"device_kind": kind, "operations": {}}
    for one in found:
        known = data["operations"].get(one.operation, {"blocks": {}})["blocks"]
        blocks = {name: fields for name, fields in known.items() if name != one.case}
        if merged := known.get(one.case, {}) | one.fields:
            blocks[one.case] = merged
        if blocks:
            entry = {"command": f"{command}  # jax {version}", "blocks": blocks}
            data = data | {"operations": data["operations"] | {one.operation: entry}}
    file.write_text(json.dumps(data, indent=1) + "\n")
    tuned.read.cache_clear()


def table(found: list[TunedCase]) -> str:
    """Text table of results."""
    lines = []
    for one in found:
        show = (lambda x: "fails" if x is None else f"{x * 1e3:.3f} ms") if one.unit == "s" else _cycles
        gain = "" if not one.before or not one.after else f" ({one.before / one.after - 1:+.1%})"
        blocks = ", ".join(f"{name} {value}" for name, value in one.fields.items()) or "the present blocks"
        lines.append(
            f"{one.operation}, {one.case}: {show(one.before)} -> {show(one.after)}{gain}: {blocks}; "
            f"{one.trials} trials of {one.candidates} legal blocks"
        )
    return "\n".join(lines)


def _cycles(x: float | None) -> str:
    return "fails" if x is None or math.isnan(x) else f"{x / 1e6:.3f} M cycles"
