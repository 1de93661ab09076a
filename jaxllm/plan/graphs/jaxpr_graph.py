"""Value graph of a jaxpr: what each operation reads, the bytes of its value on one device, and its matmul FLOPs.

Calls are inlined (``jit``, ``jax.checkpoint``, ``custom_vjp``, ``shard_map``); loops and conditions are one operation,
whose scratch bytes are those inside it. Values that share memory are one: reshapes, transposes, names, casts of the
mesh, and carries that a loop's body returns as they are, which the loop does not read unless the body does. An
operation with several results is a run without bytes of its own, which each result reads.

Bytes are those of a shard where the traced arrays say how they are split (explicit mesh axes). FLOPs count matmuls
only, two for a multiply-add; a ``while`` loop counts as one iteration, and a Pallas kernel by its own estimate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from jax.extend.core import Literal

from jaxllm.plan.formulas.device_work import shard_shape
from jaxllm.plan.graphs.value_graph import Operation, ValueGraph

VIEWS = {
    *("reshape", "squeeze", "expand_dims", "transpose", "name", "copy", "copy_p", "stop_gradient"),
    *("optimization_barrier", "reduce_precision", "pvary", "reduced_vary_cast_p", "mesh_cast", "sharding_constraint"),
}
"""Primitives whose results are their operands for memory, if they have as many bytes."""
ELEMENTWISE = {
    *("add", "sub", "mul", "div", "rem", "max", "min", "neg", "sign", "abs", "floor", "ceil", "round", "clamp"),
    *("exp", "exp2", "log", "log1p", "expm1", "tanh", "logistic", "erf", "erf_inv", "sin", "cos", "sqrt", "rsqrt"),
    *("square", "pow", "integer_pow", "cbrt", "is_finite", "not", "and", "or", "xor", "nextafter", "select_n"),
    *(
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "convert_element_type",
        "add_any",
        "broadcast_in_dim",
        "iota",
        "slice",
        "pad",
    ),
    *("shift_left", "shift_right_logical", "shift_right_arithmetic", "copy", "rev", "real", "imag"),
}
"""Primitives that compilers compute within the loop of another operation."""
REDUCTIONS = {"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "argmax", "argmin", "reduce_prod"}
_CALLS = {
    *("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2", "custom_jvp_call"),
    *("custom_vjp_call", "custom_vjp_call_jaxpr", "shard_map", "custom_lin"),
}


@dataclass(frozen=True)
class TracedGraph:
    """Value graph of a jaxpr.

    Attributes:
        graph: operations; ``time`` is FLOPs of matmuls. Its outputs are those of the jaxpr that are computed.
        primitives: primitive of each operation; "" for an argument or a constant.
        names: ``checkpoint_name``s of each value.
        results: operation of each result of the jaxpr; None for a literal.
        arguments: how many of the first operations are arguments of the jaxpr.
        carried: of the operations that are a loop's carries as it ends, what the loop began with, if it does not read
            that otherwise.
    """

    graph: ValueGraph
    primitives: tuple[str, ...]
    names: tuple[frozenset[str], ...]
    results: tuple[int | None, ...]
    arguments: int
    carried: dict[int, int]

    def needed(self) -> list[int]:
        """Operations, in order, that the results read, directly or through others, and all carries of such loops."""
        found = set(self.graph.outputs)
        for i in reversed(range(len(self.graph.operations))):
            if i in found:
                found |= set(self.graph.operations[i].inputs)
        loops = {i: self.graph.operations[i].inputs[0] for i in self.carried if self.primitives[i] == "result"}
        return sorted(found | {i for i, loop in loops.items() if loop in found})


Scratch = Callable[[TracedGraph, int, int], int]
"""Function from a loop's body, and how many of its arguments are constants and how many of those after them carries
(the rest are slices of arrays), to the bytes that its operations take."""


def graph_of(jaxpr: Any, scratch: Scratch | None = None) -> TracedGraph:
    """Value graph of a (closed) jaxpr.

    Args:
        jaxpr: of ``jax.make_jaxpr``, or of a loop's body.
        scratch: bytes that the operations of a loop's body take, for its scratch bytes; None: not counted.
    """
    reader = _Reader(scratch)
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    values: dict[Any, int] = {}
    for var in (*jaxpr.constvars, *jaxpr.invars):
        values[var] = reader.add("argument", "", (), bytes_of(var.aval), given=True)
    arguments = len(reader.operations)
    results = reader.run(jaxpr, values)
    outputs = tuple(sorted({i for i in results if i is not None and not reader.operations[i].given}))
    return TracedGraph(
        ValueGraph(tuple(reader.operations), outputs),
        tuple(reader.primitives),
        tuple(frozenset(one) for one in reader.names),
        tuple(results),
        arguments,
        reader.carried,
    )


def bytes_of(aval: Any) -> int:
    """Bytes of an array on one device, by its sharding over the mesh it was traced under; 0 for what is none."""
    if not hasattr(aval, "shape") or not hasattr(aval.dtype, "itemsize"):
        return 0
    return math.prod(local_shape(aval)) * aval.dtype.itemsize


def local_shape(aval: Any) -> tuple[int, ...]:
    """Shape of an array's shard on one device; the whole shape where it says nothing of a mesh."""
    placed = getattr(aval, "sharding", None)
    mesh, spec = getattr(placed, "mesh", None), getattr(placed, "spec", None)
    if mesh is None or spec is None or mesh.empty:
        return tuple(aval.shape)
    parts = tuple(spec.partitions)
    return shard_shape(aval.shape, (*parts, *[None] * (len(aval.shape) - len(parts))), mesh)


def flops_of(equation: Any) -> float:
    """FLOPs of an equation's matmuls on one device, inner programs included."""
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        left = local_shape(equation.invars[0].aval)
        return 2.0 * math.prod(local_shape(equation.outvars[0].aval)) * math.prod(left[i] for i in contracted)
    if name in ("ragged_dot", "ragged_dot_general"):  # every row meets one group's matrix, whichever it is
        return 2.0 * math.prod(local_shape(equation.outvars[0].aval)) * local_shape(equation.invars[0].aval)[-1]
    if name == "pallas_call":
        return float(getattr(params.get("cost_estimate"), "flops", 0) or 0)
    inner = [sum(map(flops_of, body.eqns)) for body in inner_jaxprs(equation)]
    if name == "cond":
        return max(inner, default=0.0)
    return sum(inner) * (params["length"] if name == "scan" else 1)


def inner_jaxprs(equation: Any) -> list[Any]:
    """Jaxprs among the parameters of an equation."""
    found: list[Any] = []
    for value in equation.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            body = getattr(one, "jaxpr", one)
            if hasattr(body, "eqns"):
                found.append(body)
    return found


def scan_counts(equation: Any) -> tuple[int, int]:
    """Number of constants and of carries of a scan, its first arguments; jax 0.12 keeps them as a tree of arguments."""
    params = equation.params
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    consts, carries, _ = params["ft_in"].unpack()
    return len(consts), len(carries)


class _Reader:
    """Operations of a jaxpr and of those it calls, in order."""

    def __init__(self, scratch: Scratch | None) -> None:
        self.scratch = scratch
        self.operations: list[Operation] = []
        self.primitives: list[str] = []
        self.names: list[set[str]] = []
        self.carried: dict[int, int] = {}

    def add(
        self,
        name: str,
        primitive: str,
        inputs: Iterable[int],
        size: int,
        time: float = 0.0,
        scratch: int = 0,
        given: bool = False,
    ) -> int:
        """Adds an operation; returns its index."""
        self.operations.append(Operation(name, tuple(dict.fromkeys(inputs)), size, time, scratch, given))
        self.primitives.append(primitive)
        self.names.append(set())
        return len(self.operations) - 1

    def run(self, jaxpr: Any, values: dict[Any, int]) -> list[int | None]:
        """Adds the operations of a jaxpr whose arguments are in ``values``; returns those of its results."""

        def read(var: Any) -> int | None:
            return None if isinstance(var, Literal) else values[var]

        for equation in jaxpr.eqns:
            given = [read(var) for var in equation.invars]
            results = self._equation(equation, given)
            values |= dict(zip(equation.outvars, results, strict=True))
        return [read(var) for var in jaxpr.outvars]

    def _equation(self, equation: Any, given: list[int | None]) -> list[int]:
        name = equation.primitive.name
        bodies = inner_jaxprs(equation)
        if name in _CALLS and bodies and len(bodies[0].invars) == len(given):
            return self._call(bodies[0], given)
        sizes = [bytes_of(var.aval) for var in equation.outvars]
        inputs = [i for i in given if i is not None]
        whole = name == "reshard" or name in VIEWS
        if whole and len(given) == len(sizes) and all(
            i is not None and self._size(i) == size for i, size in zip(given, sizes, strict=True)
        ):  # fmt: skip
            if name == "name" and inputs:
                self.names[inputs[0]].add(equation.params["name"])
            return inputs
        label = name + (f" {equation.params['name']}" if isinstance(equation.params.get("name"), str) else "")
        if name == "scan":
            return self._loop(equation, given, sizes, label)
        taken = 0
        if bodies and self.scratch is not None:
            graphs = [graph_of(body, self.scratch) for body in bodies]
            taken = max(self.scratch(graph, graph.arguments, 0) for graph in graphs)
        return self._results(label, name, inputs, sizes, flops_of(equation), taken)

    def _loop(self, equation: Any, given: list[int | None], sizes: list[int], label: str) -> list[int]:
        """Adds a loop; its results, carries first.

        A carry that the body returns as it is is what the loop was given. What the body only stacks as it is is read by
        that result, not by the loop.
        """
        body = inner_jaxprs(equation)[0]
        first, carries = scan_counts(equation)
        given, first = [None] * len(body.constvars) + given, len(body.constvars) + first
        traced = graph_of(body, self.scratch)
        taken = 0 if self.scratch is None else self.scratch(traced, first, carries)
        begun = {n: i for n, i in enumerate(given[first : first + carries]) if i is not None}
        same = {n: i for n, i in begun.items() if traced.results[n] == first + n}
        read = {j for i in traced.needed() for j in traced.graph.operations[i].inputs if j < traced.arguments}
        read |= {first + n for n in begun.keys() - same}
        # Of what is returned as it is: other carries of the next turn are read, stacked values by their results.
        returned = {n: j for n, j in enumerate(traced.results) if j is not None and j < traced.arguments}
        read |= {j for n, j in returned.items() if n < carries and n not in same}
        also = {n: i for n, j in returned.items() if n >= carries and j not in read and (i := given[j]) is not None}
        inputs = [i for j, i in enumerate(given) if i is not None and j in read]
        sizes = [0 if n in same else size for n, size in enumerate(sizes)]
        results = self._results(label, "scan", inputs, sizes, flops_of(equation), taken, also)
        throughout = {given[j] for j in read if not first <= j < first + carries}
        self.carried |= {results[n]: i for n, i in begun.items() if n not in same and i not in throughout}
        return [same.get(n, i) for n, i in enumerate(results)]

    def _results(
        self,
        label: str,
        primitive: str,
        inputs: list[int],
        sizes: list[int],
        time: float,
        scratch: int,
        also: Mapping[int, int] = MappingProxyType({}),
    ) -> list[int]:
        """Adds an operation, and its results if they are several; ``also``: a value that a result reads besides."""
        if len(sizes) == 1:
            return [self.add(label, primitive, (*inputs, *also.values()), sizes[0], time, scratch)]
        run = self.add(label, primitive, inputs, 0, time, scratch)
        reads = [(run, also[n]) if n in also else (run,) for n in range(len(sizes))]
        return [self.add(f"{label}[{n}]", "result", reads[n], size) for n, size in enumerate(sizes)]

    def _call(self, body: Any, given: list[int | None]) -> list[int]:
        values = {var: self.add("constant", "", (), bytes_of(var.aval), given=True) for var in body.constvars}
        for var, i in zip(body.invars, given, strict=True):
            values[var] = self.add("literal", "", (), 0, given=True) if i is None else i
        results = self.run(body, values)
        return [self.add("literal", "", (), 0, given=True) if i is None else i for i in results]

    def _size(self, i: int) -> int:
        return self.operations[i].bytes
