"""Fragment rules: a small language that says how a parameter's fragments on many ranks become one array.

Universal Checkpointing (arXiv:2406.18820, section 4) converts the checkpoints of any parallel run to one array per
parameter ("atom") by rules on names. A line has a pattern of names and how their fragments belong together:

    *.linear_fc1.weight    sharded 0 groups 2             # each rank has its part of the gate and of the up matrix
    *.linear_fc2.weight    sharded 1
    *.embedding.weight     sharded 0, padded 0 to 50257   # the vocabulary was padded to divide over the ranks
    *norm*                 replicated                     # ranks hold equal copies, bit for bit
    *.router.bias          partial mean                   # ranks hold summands (sum) or estimates (mean)
    *.wo.weight            placed                         # the checkpoint itself says where fragments lie

The first pattern that matches a name decides. ``*`` matches anything, dots included; ``#`` begins a comment. A rule may
end with the parameter's names elsewhere, in which each ``*`` is what the pattern's matched and ``{a,b}`` are several
names, each of an equal part of the fused array:

    layers.*.linear_fc1.weight  sharded 0 groups 2  -> model.layers.*.mlp.{gate,up}_proj.weight
    layers.*.linear_qkv.weight  sharded 0           -> model.layers.*.self_attn.{q,k,v}_proj.weight by query groups
    layers.*.wq.weight          placed              -> model.layers.*.self_attn.q_proj.weight by rotary pairs
    *._extra_state              replicated          -> nothing

"by query groups": rows are the query heads of a key-value head, then its key and its value. "by rotary pairs": rows
that are rotated together are neighbours; they become two halves of each head.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from jaxllm.checkpoint.errors import CheckpointError

How = Literal["sharded", "replicated", "partial", "placed"]
Order = Literal["parts", "query groups", "rotary pairs"]
GRAMMAR = (
    "PATTERN then one of: sharded DIM, sharded DIM groups N, replicated, partial sum, partial mean, placed; after it, "
    'if the array was padded: , padded DIM to SIZE (a number, or "vocabulary"); and if the names change: -> NAMES, '
    "-> NAMES by query groups, -> NAMES by rotary pairs, or -> nothing"
)
NOTHING = "nothing"

_HOW = re.compile(
    r"(?:sharded (?P<dim>\d+)(?: groups (?P<groups>\d+))?|(?P<alone>replicated|placed)|partial (?P<reduce>sum|mean))"
    r"(?: *, *padded (?P<padded>\d+) to (?P<size>\d+|vocabulary))?"
    r"(?: *-> *(?P<names>\S+)(?: by (?P<order>query groups|rotary pairs))?)?"
)
_BRACES = re.compile(r"(.*)\{([^{}]+)\}(.*)")


class AttentionHeads(NamedTuple):
    """Heads of an attention layer, by which fused and permuted rows are told apart.

    Attributes:
        keys: number of key-value heads.
        dim: elements of a head.
    """

    keys: int
    dim: int


@dataclass(frozen=True)
class FragmentRule:
    """Rule of how the fragments of some parameters become whole.

    Attributes:
        pattern: of names, with ``*`` for anything.
        how: "sharded": fragments are parts along ``dim``; "replicated": equal copies; "partial": summands or estimates;
            "placed": there is one fragment, which the checkpoint itself has made whole.
        dim: of sharded fragments.
        groups: each sharded fragment is so many parts along ``dim``, one of each of as many matrices that are fused.
        reduce: of partial fragments.
        padding: (dim, size without padding) of the whole array; None: not padded.
        names: names elsewhere, with the pattern's ``*``; None: its own; empty: the parameter is left out.
        order: of the rows of the whole array, see the module; "parts": equal parts along ``dim``, one for each name.
    """

    pattern: str
    how: How
    dim: int = 0
    groups: int = 1
    reduce: Literal["sum", "mean"] = "sum"
    padding: tuple[int, int] | None = None
    names: tuple[str, ...] | None = None
    order: Order = "parts"

    def names_of(self, name: str) -> tuple[str, ...]:
        """Names elsewhere of a parameter that matches the pattern."""
        if self.names is None:
            return (name,)
        found = re.fullmatch("(.*)".join(map(re.escape, self.pattern.split("*"))), name)
        matched = found.groups() if found else ()

        def filled(parts: list[str]) -> str:
            return "".join(part + own for part, own in zip(parts, (*matched[: len(parts) - 1], ""), strict=True))

        return tuple(filled(one.split("*")) for one in self.names)

    def split(self, name: str, whole: np.ndarray, heads: AttentionHeads | None) -> list[np.ndarray]:
        """Arrays of ``names_of(name)``, in their order, from the whole array.

        Args:
            heads: of the parameter's layer; needed where the order is of heads.

        Raises:
            CheckpointError: the rows are no such heads, or the array has no such number of equal parts.
        """
        count, size = len(self.names_of(name)), whole.shape[self.dim] if whole.ndim > self.dim else 0
        if self.order == "parts":
            if count > 1 and (not size or size % count):
                raise CheckpointError(f"{name}: shape {whole.shape} has no {count} equal parts along dim {self.dim}.")
            return np.split(whole, count, axis=self.dim) if count > 1 else [whole]
        if heads is None:
            raise CheckpointError(
                f'{name}: "by {self.order}" is for attention with plain heads, which the model lacks.'
            )
        rows, rest = (whole.shape[0] if whole.ndim else 0), whole.shape[1:]
        if self.order == "query groups":
            queries, left = divmod(rows, heads.keys * heads.dim)
            if left or queries < 3 or count != 3:
                raise CheckpointError(
                    f'{name}: shape {whole.shape} cannot be split "by query groups": each of {heads.keys} key-value '
                    f"heads has {heads.dim} rows for a key, as many for its value, and for each query head; with three "
                    "names."
                )
            grouped = whole.reshape(heads.keys, queries, heads.dim, *rest)
            parts = grouped[:, :-2], grouped[:, -2], grouped[:, -1]
            return [part.reshape(-1, *rest) for part in parts]
        if not rows or rows % heads.dim or heads.dim % 2:
            raise CheckpointError(f'{name}: shape {whole.shape} has no heads of {heads.dim} rows "by rotary pairs".')
        pairs = whole.reshape(rows // heads.dim, heads.dim // 2, 2, *rest)
        return [pairs.swapaxes(1, 2).reshape(whole.shape)]

    def whole_shape(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Shape of ``whole`` from the shapes of the fragments, which are not compared."""
        shape = list(shapes[0])
        if self.how == "sharded" and self.dim < len(shape):
            shape[self.dim] = sum(own[self.dim] for own in shapes)
        if self.padding is not None and self.padding[0] < len(shape):
            shape[self.padding[0]] = min(shape[self.padding[0]], self.padding[1])
        return tuple(shape)

    def whole(self, name: str, fragments: Sequence[np.ndarray]) -> np.ndarray:
        """The parameter from its fragments, in the order of the ranks that split it.

        Raises:
            CheckpointError: the fragments do not fit the rule.
        """
        if not fragments:
            raise CheckpointError(f"{name}: there are no fragments.")
        ways = {"sharded": self._sharded, "replicated": _equal, "partial": self._partial, "placed": _only}
        found = ways[self.how](name, fragments)
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


def parse_rules(text: str, vocabulary: int | None = None) -> tuple[FragmentRule, ...]:
    """Rules from their lines.

    Args:
        text: the lines.
        vocabulary: size that the word "vocabulary" stands for.

    Raises:
        CheckpointError: a line is no rule; names the line and the grammar.
    """
    rules = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#")[0].split(maxsplit=1)
        if not words:
            continue
        where = f"fragment rules, line {number}"
        found = _HOW.fullmatch(" ".join(words[1].split())) if len(words) == 2 else None
        if found is None:
            raise CheckpointError(f"{where}: {line.strip()!r} is no rule. A rule is: {GRAMMAR}.")
        if found["size"] == "vocabulary" and vocabulary is None:
            raise CheckpointError(f"{where}: the vocabulary's size is not known here; give it as a number.")
        how: How = found["alone"] or ("partial" if found["reduce"] else "sharded")  # type: ignore[assignment]
        size = vocabulary if found["size"] == "vocabulary" else int(found["size"] or 0)
        padding = (int(found["padded"]), size) if found["padded"] else None
        groups, reduce = int(found["groups"] or 1), found["reduce"] or "sum"
        if groups < 1:
            raise CheckpointError(f"{where}: groups {groups}; give 1 or more.")
        names = None if found["names"] is None else _expanded(found["names"])
        if any(name.count("*") > words[0].count("*") for name in names or ()):
            raise CheckpointError(f"{where}: {found['names']} has more * than the pattern {words[0]}.")
        order = found["order"] or "parts"
        rules.append(FragmentRule(words[0], how, int(found["dim"] or 0), groups, reduce, padding, names, order))  # type: ignore[arg-type]
    return tuple(rules)


def _expanded(names: str) -> tuple[str, ...]:
    """Names of ``a{b,c}d``; none of "nothing"."""
    if names == NOTHING:
        return ()
    found = _BRACES.fullmatch(names)
    return (names,) if found is None else tuple(f"{found[1]}{own}{found[3]}" for own in found[2].split(","))


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


def _only(name: str, fragments: Sequence[np.ndarray]) -> np.ndarray:
    if len(fragments) != 1:
        raise CheckpointError(
            f"{name}: its rule says placed, but it has {len(fragments)} fragments and this kind of checkpoint does not "
            "say where they lie; say sharded DIM, replicated or partial."
        )
    return fragments[0]
