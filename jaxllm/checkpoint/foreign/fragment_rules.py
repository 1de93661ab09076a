"""Fragment rules: a small language that says how a parameter's fragments on many ranks become one array.

Universal Checkpointing (arXiv:2406.18820, section 4) converts the checkpoints of any parallel run to one array per
parameter ("atom") by rules on names. A line has a pattern of names and how their fragments belong together:

    *.linear_fc1.weight    sharded 0 groups 2             # each rank has its part of the gate and of the up matrix
    *.linear_fc2.weight    sharded 1
    *.embedding.weight     sharded 0, padded 0 to 50257   # the vocabulary was padded to divide over the ranks
    *norm*                 replicated                     # ranks hold equal copies, bit for bit
    *.router.bias          partial mean                   # ranks hold summands (sum) or estimates (mean)

The first pattern that matches a name decides. ``*`` matches anything, dots included; ``#`` begins a comment.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxllm.checkpoint.errors import CheckpointError

How = Literal["sharded", "replicated", "partial"]
GRAMMAR = (
    "PATTERN then one of: sharded DIM, sharded DIM groups N, replicated, partial sum, partial mean; and after it, if "
    "the array was padded: , padded DIM to SIZE"
)

_HOW = re.compile(
    r"(?:sharded (?P<dim>\d+)(?: groups (?P<groups>\d+))?|(?P<replicated>replicated)|partial (?P<reduce>sum|mean))"
    r"(?: *, *padded (?P<padded>\d+) to (?P<size>\d+))?"
)


@dataclass(frozen=True)
class FragmentRule:
    """Rule of how the fragments of some parameters become whole.

    Attributes:
        pattern: of names, with ``*`` for anything.
        how: "sharded": fragments are parts along ``dim``; "replicated": equal copies; "partial": summands or estimates.
        dim: of sharded fragments.
        groups: each sharded fragment is so many parts along ``dim``, one of each of as many matrices that are fused.
        reduce: of partial fragments.
        padding: (dim, size without padding) of the whole array; None: not padded.
    """

    pattern: str
    how: How
    dim: int = 0
    groups: int = 1
    reduce: Literal["sum", "mean"] = "sum"
    padding: tuple[int, int] | None = None

    def whole(self, name: str, fragments: Sequence[np.ndarray]) -> np.ndarray:
        """The parameter from its fragments, in the order of the ranks that split it.

        Raises:
            CheckpointError: the fragments do not fit the rule.
        """
        if not fragments:
            raise CheckpointError(f"{name}: there are no fragments.")
        found = {"sharded": self._sharded, "replicated": _equal, "partial": self._partial}[self.how](name, fragments)
        if self.padding is None:
            return found
        dim, size = self.padding
        if dim >= found.ndim or found.shape[dim] < size:
            raise CheckpointError(
                f'{name}: by "{self.pattern}" dim {dim} is padded to more than {size}, but its shape is {found.shape}.'
            )
        return found[(*(slice(None),) * dim, slice(size))]

    def _sharded(self, name: str, fragments: Sequence[np.ndarray]) -> np.ndarray:
        others = {(f.dtype, f.shape[: self.dim], f.shape[self.dim + 1 :]) for f in fragments}
        if len(others) > 1 or any(self.dim >= f.ndim or f.shape[self.dim] % self.groups for f in fragments):
            raise CheckpointError(
                f'{name}: fragments of shapes {[f.shape for f in fragments]} are not "sharded {self.dim}'
                f'{f" groups {self.groups}" if self.groups > 1 else ""}" ({self.pattern}): all other dims and dtypes '
                "must be equal, and the groups must divide the dim."
            )
        parts = [np.split(f, self.groups, axis=self.dim) for f in fragments]
        return np.concatenate([own[g] for g in range(self.groups) for own in parts], axis=self.dim)

    def _partial(self, name: str, fragments: Sequence[np.ndarray]) -> np.ndarray:
        if len({(f.dtype, f.shape) for f in fragments}) > 1:
            raise CheckpointError(
                f"{name}: partial fragments differ in shape or dtype: {[f.shape for f in fragments]}."
            )
        total = np.sum(np.stack(fragments), axis=0, dtype=np.result_type(fragments[0].dtype, np.float32))
        return (total / len(fragments) if self.reduce == "mean" else total).astype(fragments[0].dtype)


def parse_rules(text: str) -> tuple[FragmentRule, ...]:
    """Rules from their lines.

    Raises:
        CheckpointError: a line is no rule; names the line and the grammar.
    """
    rules = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#")[0].split(maxsplit=1)
        if not words:
            continue
        found = _HOW.fullmatch(" ".join(words[1].split())) if len(words) == 2 else None
        if found is None:
            raise CheckpointError(f"fragment rules, line {number}: {line.strip()!r} is no rule. A rule is: {GRAMMAR}.")
        how: How = "replicated" if found["replicated"] else "partial" if found["reduce"] else "sharded"
        padding = (int(found["padded"]), int(found["size"])) if found["padded"] else None
        groups, reduce = int(found["groups"] or 1), found["reduce"] or "sum"
        if groups < 1:
            raise CheckpointError(f"fragment rules, line {number}: groups {groups}; give 1 or more.")
        rules.append(FragmentRule(words[0], how, int(found["dim"] or 0), groups, reduce, padding))  # type: ignore[arg-type]
    return tuple(rules)


def rule_for(name: str, rules: Sequence[FragmentRule]) -> FragmentRule:
    """The first rule whose pattern matches a name.

    Raises:
        CheckpointError: none does.
    """
    for rule in rules:
        if fnmatch.fnmatchcase(name, rule.pattern):
            return rule
    patterns = ", ".join(rule.pattern for rule in rules) or "none"
    raise CheckpointError(f"no fragment rule matches {name}; there are: {patterns}. Add a line: {GRAMMAR}.")


def consolidate(
    fragments: Mapping[str, Sequence[Callable[[], np.ndarray]]], rules: Sequence[FragmentRule]
) -> dict[str, np.ndarray]:
    """Whole parameters of a run, each from its fragments.

    Args:
        fragments: name -> calls that read its fragments, in the order of the ranks that split it.
        rules: of all the names.

    Raises:
        CheckpointError: a name has no rule, or its fragments do not fit it.
    """
    chosen = {name: rule_for(name, rules) for name in fragments}  # before anything is read
    return {name: rule.whole(name, [read() for read in fragments[name]]) for name, rule in chosen.items()}


def _equal(name: str, fragments: Sequence[np.ndarray]) -> np.ndarray:
    first = fragments[0]
    for rank, other in enumerate(fragments):
        if other.dtype != first.dtype or other.shape != first.shape or other.tobytes() != first.tobytes():
            raise CheckpointError(
                f"{name}: the copy of rank {rank} is not equal to that of rank 0, but its rule says replicated; say "
                "partial mean for ranks that have drifted apart, or sharded DIM."
            )
    return first
