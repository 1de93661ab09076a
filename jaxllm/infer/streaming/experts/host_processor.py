"""Host processor: computes experts where their weights are, on tokens that are sent there (Fiddler, arXiv:2402.07033).

The programs are XLA's for the host, in the format of the expert's weights, for a few numbers of rows each.

Legend: T rows of the flat batch, A experts of a token, n rows of an expert, D embed.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, Shaped

from jaxllm.files import digest
from jaxllm.infer.runner.program_cache import EngineProgram

STEP = 4
"""Ratio of the numbers of rows that programs are compiled for."""
ROUNDS = 3
"""Measurements of which the fastest counts."""


class HostProcessor:
    """The host's processor as a place where experts of mixture layers compute.

    Args:
        most: most rows of a step.

    Attributes:
        device: the host.
        rows: numbers of rows that programs are compiled for, ascending.
    """

    def __init__(self, most: int):
        self.device = jax.devices("cpu")[0]
        self._place = jax.sharding.SingleDeviceSharding(self.device)
        self.rows = tuple(sorted({min(STEP**n, most) for n in range(32)}))

    def programs(
        self, name: str, function: Callable[..., Any], experts: Sequence[Any], embed: int, dtype: Any, key: Any
    ) -> list[EngineProgram]:
        """Programs of a kind of layer, one for each shape of its experts and each number of rows.

        Args:
            name: of the kind.
            function: ``(expert, rows[n D], weights[n]) -> rows[n D]``.
            experts: its experts, as trees of arrays.
            embed, dtype: of the rows.
            key: see ``EngineProgram``.
        """
        abstract = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=self._place)  # noqa: E731
        found: dict[str, EngineProgram] = {}
        for expert in experts:
            content = jax.tree.map(lambda x: abstract(x.shape, x.dtype), expert)
            for n in self.rows:
                wide = jnp.promote_types(dtype, jnp.float32)
                arguments = {"expert": content, "rows": abstract((n, embed), dtype), "weights": abstract((n,), wide)}
                made = program_name(name, expert, n)
                if made not in found:
                    found[made] = EngineProgram(made, function, arguments, (), key, devices=(self.device,))
        return list(found.values())

    def put(self, tree: Any) -> Any:
        """Arrays in the host's memory as its programs take them; not copied where they are aligned."""
        return jax.device_put(tree, self._place)

    def run(
        self,
        programs: Mapping[str, Any],
        name: str,
        contents: Mapping[int, Any],
        h: Float[np.ndarray, "T D"],
        chosen: Int[np.ndarray, "T A"],
        weights: Float[np.ndarray, "T A"],
    ) -> Float[np.ndarray, "T D"]:
        """Sum of the outputs of some experts, weighted.

        Args:
            programs: compiled programs by name.
            name: of the kind of layer.
            contents: weights of each expert that computes, on the host.
            h, chosen, weights: inputs, experts and combine weights of the tokens of requests.
        """
        started = []
        for expert, content in contents.items():
            tokens, choices = np.nonzero(chosen == expert)
            for at in range(0, len(tokens), self.rows[-1]):
                some, own = tokens[at : at + self.rows[-1]], choices[at : at + self.rows[-1]]
                n = self.rows[bisect.bisect_left(self.rows, len(some))]
                program = programs[program_name(name, content, n)]
                given = self.put((_padded(h[some], n), _padded(weights[some, own], n)))
                started.append((some, program(content, *given)))
        total = np.zeros(h.shape, jnp.promote_types(h.dtype, jnp.float32))
        for some, out in started:
            total[some] += np.asarray(out)[: len(some)]
        return total.astype(h.dtype)

    def seconds(
        self, programs: Mapping[str, Any], name: str, content: Any, h: Float[np.ndarray, "T D"]
    ) -> tuple[float, ...]:
        """Measured seconds of an expert for each of ``rows``, of inputs like ``h``."""
        found = []
        for n in self.rows:
            inputs, chosen = np.resize(h, (n, h.shape[1])), np.zeros((n, 1), np.int32)
            weights = np.ones((n, 1), jnp.promote_types(h.dtype, jnp.float32))
            found.append(fastest(lambda i=inputs, c=chosen, w=weights: self.run(programs, name, {0: content}, i, c, w)))
        return tuple(np.maximum.accumulate(found).tolist())


def fastest(run: Callable[[], Any]) -> float:
    """Seconds of a call whose result is there when it returns: the fastest of some after a first one."""
    run()
    found = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        run()
        found.append(time.perf_counter() - begin)
    return min(found)


def program_name(name: str, expert: Any, rows: int) -> str:
    """Name of the program that computes an expert of these shapes for so many rows."""
    shapes = [[*x.shape, str(x.dtype)] for x in jax.tree.leaves(expert)]
    return f"host-{name}-{rows}-{digest(shapes)[:16]}"


def _padded(x: Shaped[np.ndarray, "m ..."], rows: int) -> Shaped[np.ndarray, "n ..."]:
    return np.pad(x, [(0, rows - len(x)), *[(0, 0)] * (x.ndim - 1)])
