"""Cost of a program by its StableHLO text: a small sequence model predicts FLOPs, bytes and seconds.

After the ML-driven cost model for MLIR (arXiv:2302.11405): the text of a program is read as a sequence of tokens. Here
a line is an operation; its tokens are names (operations, dtypes, attributes) and numbers (dimensions). A line's tokens
are embedded and summed, lines exchange what they say with their neighbours by two convolutions, and each line gives a
logarithm of a cost for each target; a program's cost is the sum over its lines, as it is in a device. The model is
trained on generated programs that were compiled and measured on the device at hand, so its seconds are of that device.

Legend: B programs, S lines, N buckets of names, T places of dimensions in a line, K targets.
"""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from jaxllm.tune import timing
from jaxllm.tune.forest import r_squared

TARGETS = ("flops", "bytes", "seconds")
NAMES, WIDTH, LINES = 256, 48, 96
"""Buckets of names, width of the model, and most lines of a program."""
TENSORS, RANK = 3, 4
"""Tensors of a line whose dimensions are read (first and second operand, result), and dimensions of each."""
SPAN = 8.0
"""Natural logarithms that the costs of lines differ by, about: what the last layer's results are multiplied by."""
KERNEL = 3
"""Lines that a convolution sees at a time."""
TENSOR = re.compile(r"tensor<((?:\d+x)*)([a-z]\w*)>")
NAME = re.compile(r"[a-z_][a-z_.0-9]*[a-z_0-9]")
SKIPPED = re.compile(r"^\s*(module|func\.func|return|\}|func\.return|$)")


class ProgramExample(NamedTuple):
    """Program with its costs.

    Attributes:
        text: StableHLO.
        costs: of each target.
    """

    text: str
    costs: dict[str, float]


class HeldOutError(NamedTuple):
    """Error on programs that the model has not seen: R2 of the logarithm, and median of the relative errors."""

    r_squared: float
    median: float


def read_program(file: Path) -> str:
    """StableHLO text of a file.

    Raises:
        ValueError: the file has no StableHLO operation.
    """
    text = file.read_text()
    if "stablehlo." not in text:
        raise ValueError(f"{file}: no StableHLO; give the text that `jax.jit(f).lower(...).as_text()` returns.")
    return text


class Tokens(NamedTuple):
    """Tokens of programs by line.

    Attributes:
        names: how often each bucket of names occurs in a line.
        numbers: logarithms of the dimensions of the operands and the result, each at its place; 0 elsewhere.
        places: 1 where a dimension stands.
    """

    names: Float[np.ndarray, "*B S N"]
    numbers: Float[np.ndarray, "*B S T"]
    places: Float[np.ndarray, "*B S T"]


def tokenize(text: str) -> Tokens:
    """Tokens of a program, a line for each operation; names, among them dtypes, are hashed to buckets.

    A line ends with the types of its operands and of its result, ``(tensor<8x16xf32>, ...) -> tensor<8xf32>``, or with
    one type that is that of all. Names of values are left out.
    """
    lines = [line for line in text.splitlines() if not SKIPPED.match(line)][:LINES]
    found = Tokens(*(np.zeros((len(lines), n), np.float32) for n in (NAMES, TENSORS * RANK, TENSORS * RANK)))
    for row, line in enumerate(lines):
        plain = re.sub(r"%[\w:#]+|\"[^\"]*\"|loc\([^)]*\)", " ", line)
        tensors = TENSOR.findall(plain)
        # The last type is the result's; one that stands alone is the operands' as well.
        shown = [tensors[0], tensors[min(1, len(tensors) - 1)], tensors[-1]] if tensors else []
        for tensor, (dims, dtype) in enumerate(shown):
            for place, size in enumerate(dims.split("x")[:-1][:RANK], tensor * RANK):
                found.numbers[row, place], found.places[row, place] = np.log2(1 + int(size)) / 8, 1
            found.names[row, zlib.crc32(dtype.encode()) % NAMES] += 1
        for name in NAME.findall(TENSOR.sub(" ", plain)):
            found.names[row, zlib.crc32(name.encode()) % NAMES] += 1
    return found


def stack_programs(programs: Sequence[Tokens]) -> Tokens:
    """Tokens of several programs in one array, padded to the most lines."""
    most = max(len(one.names) for one in programs)
    return Tokens(
        *(np.stack([np.pad(x, ((0, most - len(x)), (0, 0))) for x in part]) for part in zip(*programs, strict=True))
    )


def init_model(key: Array) -> dict[str, Array]:
    """Parameters of the sequence model."""
    shapes = {
        "names": (NAMES, WIDTH),
        "numbers": (TENSORS * RANK, WIDTH),
        "places": (TENSORS * RANK, WIDTH),
        "mix_a": (KERNEL * WIDTH, WIDTH),
        "mix_b": (KERNEL * WIDTH, WIDTH),
        "hidden": (2 * WIDTH, 2 * WIDTH),
        "out": (2 * WIDTH, len(TARGETS)),
    }
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(one, shape) * (0.1 if name == "names" else shape[0] ** -0.5)
        for (name, shape), one in zip(shapes.items(), keys, strict=True)
    } | {"start": jnp.zeros(len(TARGETS))}


def predict_logs(params: dict[str, Array], tokens: Any) -> Float[Array, "B K"]:
    """Logarithms of the costs of programs: of the sum of what their lines cost.

    Args:
        params: see ``init_model``.
        tokens: ``Tokens`` of the programs.
    """
    live = jnp.any(tokens.names > 0, axis=2)[..., None]
    # A number counts by where it stands in its line: a dimension of the first or second operand, or of the result.
    x = sum(part @ params[name] for part, name in zip(tokens, ("names", "numbers", "places"), strict=True))
    first = x = live * x
    for mix in ("mix_a", "mix_b"):
        padded = jnp.pad(x, ((0, 0), (KERNEL // 2, KERNEL // 2), (0, 0)))
        window = jnp.concatenate([padded[:, i : i + x.shape[1]] for i in range(KERNEL)], axis=2)
        x = x + live * jax.nn.gelu(window @ params[mix])
    hidden = jax.nn.gelu(jnp.concatenate([first, x], axis=2) @ params["hidden"])
    logs = SPAN * (hidden @ params["out"]) + params["start"]
    return jax.nn.logsumexp(jnp.where(live, logs, -1e9), axis=1)


@dataclass(frozen=True)
class ProgramCostModel:
    """Trained sequence model.

    Attributes:
        params: its parameters.
    """

    params: dict[str, Array]

    def predict(self, texts: Sequence[str]) -> list[dict[str, float]]:
        """FLOPs, bytes and seconds of programs."""
        tokens = stack_programs([tokenize(text) for text in texts])
        logs = np.asarray(jax.jit(predict_logs)(self.params, tokens), np.float64)
        return [dict(zip(TARGETS, map(float, np.exp(row)), strict=True)) for row in logs]


def train(examples: Sequence[ProgramExample], steps: int, seed: int = 0) -> ProgramCostModel:
    """Model trained on examples by AdamW, on the squared errors of the logarithms, each target by its own spread."""
    tokens = stack_programs([tokenize(one.text) for one in examples])
    logs = np.log([[one.costs[name] for name in TARGETS] for one in examples])
    goal, spread = logs.astype(np.float32), logs.std(axis=0)
    rule = optax.adamw(optax.cosine_decay_schedule(3e-3, steps), weight_decay=1e-3)
    batch = min(64, len(examples))

    def loss(params: Any, tokens: Any, goal: Array) -> Array:
        return jnp.mean(jnp.square((predict_logs(params, tokens) - goal) / spread))

    @jax.jit
    def run(params: Any, key: Array, *data: Any) -> Any:
        def step(carry: Any, key: Array) -> tuple[Any, None]:
            params, state = carry
            rows = jax.random.choice(key, len(examples), (batch,), replace=False)
            part = jax.tree.map(lambda x: x[rows], data)
            updates, state = rule.update(jax.grad(loss)(params, *part), state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, rule.init(params)), jax.random.split(key, steps))[0][0]

    first, key = jax.random.split(jax.random.key(seed))
    lines = np.mean(np.sum(np.any(tokens.names > 0, axis=2), axis=1))
    begun = init_model(first) | {"start": jnp.asarray(logs.mean(axis=0) - np.log(lines), jnp.float32)}
    return ProgramCostModel(run(begun, key, jax.tree.map(jnp.asarray, tokens), goal))


def train_and_test(
    examples: Sequence[ProgramExample], steps: int, seed: int = 0
) -> tuple[ProgramCostModel, dict[str, HeldOutError]]:
    """Model trained on three quarters of the examples, and its error on the others, by target."""
    order = np.random.default_rng(seed).permutation(len(examples))
    held, seen = ([examples[i] for i in part] for part in np.split(order, [len(examples) // 4]))
    model = train(seen, steps, seed)
    found = model.predict([one.text for one in held])
    error = {}
    for name in TARGETS:
        got, want = (np.log([row[name] for row in rows]) for rows in (found, [one.costs for one in held]))
        error[name] = HeldOutError(r_squared(got, want), float(np.median(np.abs(np.exp(got - want) - 1))))
    return model, error


# --- generated programs ----------------------------------------------------------------------------------------------

Layer = Callable[[Array, Array], Array]
"""``(x [rows, width], weight [width, width of the result]) -> result``; most layers do not use the weight."""

LAYERS: tuple[Layer, ...] = (
    lambda x, w: x @ w,
    lambda x, w: jax.nn.gelu(x @ w),
    lambda x, w: jax.nn.silu(x) * x,
    lambda x, w: x * jax.lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + 1e-5),
    lambda x, w: jax.nn.softmax(x, axis=1),
    lambda x, w: jax.nn.softmax(x @ x.T, axis=1) @ x,
    lambda x, w: x + jnp.sum(jnp.tanh(x.T @ x), axis=0),
    lambda x, w: jnp.transpose(jnp.exp(-x)) @ x,
)
SIZES = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)


def random_program(rng: np.random.Generator) -> tuple[Callable[..., Array], list[tuple[int, int]]]:
    """Random program of one to six layers on a matrix, and the shapes of its arguments: the matrix and weights."""
    chosen = [LAYERS[i] for i in rng.integers(len(LAYERS), size=rng.integers(1, 7))]
    shapes = [(int(rng.choice(SIZES)), int(rng.choice(SIZES)))]

    def run(x: Array, *weights: Array) -> Array:
        for layer, w in zip(chosen, weights, strict=True):
            x = layer(x, w)
        return x

    x = jax.ShapeDtypeStruct(shapes[0], jnp.float32)
    for layer in chosen:
        shapes.append((x.shape[1], int(rng.choice(SIZES))))
        x = jax.eval_shape(layer, x, jax.ShapeDtypeStruct(shapes[-1], jnp.float32))
    return run, shapes


@functools.cache
def generate(count: int, seed: int = 0) -> tuple[ProgramExample, ...]:
    """Generated programs, with FLOPs and bytes as XLA counts them in the compiled program, and measured seconds."""
    rng, found = np.random.default_rng(seed), []
    while len(found) < count:
        run, shapes = random_program(rng)
        arrays = [jnp.asarray(rng.normal(size=shape) / shape[0] ** 0.5, jnp.float32) for shape in shapes]
        lowered = jax.jit(run).lower(*arrays)
        compiled = lowered.compile()
        cost = compiled.cost_analysis() or {}
        flops, moved = cost.get("flops", 0.0), cost.get("bytes accessed", 0.0)
        if flops > 0 and moved > 0:
            costs = {"flops": flops, "bytes": moved, "seconds": timing.seconds(compiled, arrays, 3)}
            found.append(ProgramExample(lowered.as_text(), costs))
    return tuple(found)
