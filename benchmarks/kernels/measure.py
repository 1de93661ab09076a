"""Times contenders on one shape and checks their values; what they are is in the modules of the operations.

A roofline is the larger of FLOPs by peak and bytes by bandwidth; a device whose figures are not known is measured with
a large product and a large copy. Errors are the largest ||x - y|| / ||y|| of results and gradients, against plain JAX
in float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxllm.compiler.device_peaks import peak_of
from jaxllm.tune.timing import difference, seconds
from pallas_kernels._compat import target_device
from pallas_kernels._mosaic_gpu import HOPPER

PARTS = ("forward", "backward")


class Cost(NamedTuple):
    """Lower bound of a pass on one device: FLOPs and bytes."""

    flops: int
    bytes: int


class Answer(NamedTuple):
    """Result of a contender: seconds of the forward pass and of forward plus backward, values, device."""

    forward: float
    both: float | None
    results: Any
    where: str


@dataclass(frozen=True)
class Work:
    """One shape of an operation.

    Attributes:
        shape: for the table.
        inputs: arrays, the differentiated ones first.
        truth: the operation in plain JAX.
        contenders: functions of the inputs; the result, or (result, what replaces the last input).
        costs: of the forward pass, and of the backward pass where there is one.
        differentiated: how many inputs.
        carried: whether the last input is updated in place.
        d_out: the result's gradient, where there is a backward pass.
        own_truth: of contenders that compute something else.
        elsewhere: contenders in other processes, given the inputs, ``d_out`` and the repeats.
    """

    shape: Mapping[str, Any]
    inputs: tuple[Any, ...]
    truth: Callable[..., Any]
    contenders: Mapping[str, Callable[..., Any]]
    costs: tuple[Cost, ...]
    differentiated: int = 0
    carried: bool = False
    d_out: Any = None
    own_truth: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    elsewhere: Mapping[str, Callable[[tuple[Any, ...], Any, int], Answer]] = dataclasses.field(default_factory=dict)


def ours() -> tuple[str, ...]:
    """Names of our implementations that are made for this platform."""
    return ("xla", *{"tpu": ("pallas_tpu",), "gpu": ("pallas_gpu",)}.get(target_device().platform, ()))


def hopper() -> tuple[str, ...]:
    """Name of the Mosaic-GPU kernels where this device has wgmma: a contender beside ``ours``."""
    here = target_device()
    return ("mosaic_gpu",) if here.platform == "gpu" and HOPPER.search(here.kind) else ()


def peaks() -> tuple[float, float]:
    """FLOP/s and bytes/s of the device: known, or measured."""
    if (known := peak_of(jax.devices()[0].device_kind)) is not None:
        return known
    x, y = jnp.ones((1024, 1024), jnp.float32), jnp.ones(2**24, jnp.float32)
    product = 2 * 1024**3 / seconds(jax.jit(lambda x: x @ x), (x,), 3)
    return product, 2 * y.nbytes / seconds(jax.jit(lambda y: y + 1), (y,), 3)


def passes(function: Callable[..., Any], work: Work) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(forward, forward and backward), compiled. The second takes the result's gradient behind the inputs."""
    if work.carried:
        jitted = jax.jit(function, donate_argnums=len(work.inputs) - 1)
        return jitted, jitted

    def both(*arguments: Any) -> Any:
        *inputs, d_out = arguments
        first, rest = inputs[: work.differentiated], inputs[work.differentiated :]
        out, pull = jax.vjp(lambda *first: function(*first, *rest), *first)
        return out, *pull(d_out)

    return jax.jit(function), jax.jit(both)


def _results(function: Callable[..., Any], work: Work, inputs: Sequence[Any], d_out: Any) -> list[Any]:
    """The result and its gradients."""
    forward, both = passes(function, work)
    if work.carried:
        return [jax.device_get(forward(*inputs[:-1], jax.tree.map(jnp.copy, inputs[-1]))[0])]
    if not work.differentiated:
        return [jax.device_get(forward(*inputs))]
    return list(jax.device_get(both(*inputs, d_out)))


def exact(tree: Any) -> Any:
    """Floats in float32."""
    return jax.tree.map(lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def measure(name: str, work: Work, repeats: int) -> list[dict[str, Any]]:
    """A row for each contender; one that fails says why."""
    with jax.default_matmul_precision("highest"):
        inputs, d_out = exact(work.inputs), exact(work.d_out)
        wants = {who: _results(f, work, inputs, d_out) for who, f in {"": work.truth, **work.own_truth}.items()}

    def run(function: Callable[..., Any]) -> Answer:
        results = _results(function, work, work.inputs, work.d_out)
        forward, both = passes(function, work)
        one = seconds(forward, work.inputs, repeats, work.carried)
        two = None
        if work.differentiated:
            two = seconds(both, (*work.inputs, work.d_out), repeats)
        return Answer(one, two, results, jax.default_backend())

    runs: dict[str, Callable[[], Answer]] = {}
    for who, function in work.contenders.items():
        runs[who] = lambda function=function: run(function)
    for who, elsewhere in work.elsewhere.items():
        runs[who] = lambda elsewhere=elsewhere: elsewhere(work.inputs, work.d_out, repeats)
    peak, bandwidth = peaks()
    rows = []
    for who, call in runs.items():
        row: dict[str, Any] = {"shape": name, "contender": who, **work.shape}
        try:
            answer = call()
        except Exception as refusal:  # others' kernels fail in many ways: the table says which
            rows.append(row | {"failed": f"{type(refusal).__name__}: {str(refusal).splitlines()[0][:120]}"})
            continue
        row |= {"on": answer.where, "error": difference(answer.results, wants.get(who, wants[""]))}
        took = [answer.forward, *([] if answer.both is None else [max(answer.both - answer.forward, 1e-9)])]
        for part, time_taken, cost in zip(PARTS, took, work.costs, strict=False):
            row[f"{part}_seconds"], row[f"{part}_flops"], row[f"{part}_bytes"] = time_taken, *cost
            row[f"{part}_roofline"] = max(cost.flops / peak, cost.bytes / bandwidth) / time_taken
        rows.append(row)
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Prints a table."""
    titles = "".join(f"{part + ' ms':>14}{'TFLOP/s':>10}{'GB/s':>9}{'roofline':>10}" for part in PARTS)
    print(f"{'shape':<30}{'who':<18}{titles}{'error':>10}")
    for row in rows:
        line = f"{row['shape']:<30}{row['contender']:<18}"
        if "failed" in row:
            print(line + row["failed"])
            continue
        for part in PARTS:
            took = row.get(f"{part}_seconds")
            if took is None:
                line += " " * 43
                continue
            flops, size = (row[f"{part}_{what}"] / took for what in ("flops", "bytes"))
            line += f"{took * 1e3:14.3f}{flops / 1e12:10.2f}{size / 1e9:9.1f}{row[f'{part}_roofline']:10.1%}"
        print(f"{line}{row['error']:10.1e}")
