"""Gradient checkpointing (remat): which values the backward pass recomputes, by named policy and by layers.

Also called activation checkpointing or selective recomputation. Examples of ``DecoderConfig.remat``:

"full"                      every block is recomputed
"none=8,full=24"            the first 8 layers keep every value, the other 24 keep their input alone

none         every intermediate value is kept
elementwise  norms, rotary embeddings and activation functions are recomputed, and no matmul but projections whose
             results norms or clipping read
attention    attention itself as well, from the saved queries, keys and values, but no matmul with a weight: the
             selective recomputation of arXiv:2205.05198, whose scores a flash kernel never stores
full         the whole block is recomputed from its input (arXiv:1604.06174)
save:VALUES  the block's input and the named values are kept, such as "save:k+attention": the rows of ``VALUES``, or
             ``GROUPS`` of them; "save:attention+qkv@host" moves queries, keys and values to host memory, and
             "input@host" the block's input
sqrt         runs of about the square root of the layers are recomputed from the input of the first, and each block in
             them from its own (arXiv:1604.06174, section 4.1): a and b inputs are kept of a b layers, at the cost of a
             second recomputation of the forward pass
offload      activation offload: the values that "elementwise" keeps, and the block's input, are moved to host memory
offload:0.5  the results of matmuls with weights are offloaded for half of each row's tokens and recomputed for the
             others; the block's input, the attention output and the residual stream before the feed-forward layer are
             offloaded for all tokens (MEMO, arXiv:2407.12117, section 4.1)
compact:0.25 every intermediate value is kept except the inputs of matmuls with weights; a random projection of them to
             a quarter of their elements is kept for an estimate of the weight gradients
             (``jaxllm.models.compact_matmul``)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

import sharding
from jaxllm.models.batch_seed import current_batch_seed
from jaxllm.models.compact_matmul import CompactWeight
from jaxllm.models.layers.values_by_layers import parse_by_layers, split_by_segment
from jaxllm.models.linear import Weight, dense, gather, matmul_by_expert, project
from pallas_kernels.flash_attention import RESIDUALS
from sharding import LogicalAxes

Name = Literal["none", "elementwise", "attention", "full", "save", "sqrt", "offload", "compact"]
Policy = str
"""Remat policy of a layer: a ``Name``; "save" carries the values it keeps, "offload" may carry its share of tokens,
"compact" carries its share of kept elements."""

VALUES: dict[str, tuple[str, ...]] = {
    "q": RESIDUALS[:1],
    "k": RESIDUALS[1:2],
    "v": RESIDUALS[2:3],
    "attention": RESIDUALS[3:],
    "residual": ("residual",),
    "gate": ("gate",),
    "up": ("up",),
    **{name: (name,) for name in ("q_proj", "k_proj", "v_proj", "o_proj", "down", "q_latent", "kv_latent", "kv_up")},
}
"""Values of a block that "save" may keep, each with its ``checkpoint_name``s: queries, keys and values as attention
takes them, its results, the stream before the feed-forward layer, the results of gate and up; where norms or clipping
read them, also projected queries, keys and values before these, and outputs of both sublayers (``o_proj``, ``down``);
of latent attention the latents before their norms (the shared key with that of keys and values), and the keys and
values that are projected from the latter."""
GROUPS: dict[str, tuple[str, ...]] = {"qkv": ("q", "k", "v"), "inner": ("gate", "up")}
"""Several ``VALUES`` by one name."""
ELEMENTWISE = ("q", "k", "v", "attention", "residual", "gate", "up")
"""``VALUES`` that "elementwise" keeps."""
MATMUL_RESULTS = tuple(name for value in ELEMENTWISE for name in VALUES[value])
"""``checkpoint_name``s of the values that "elementwise" keeps."""
BEFORE_ATTENTION = tuple(name for name in MATMUL_RESULTS if name not in RESIDUALS[3:])
"""``MATMUL_RESULTS`` without the results of attention (its output and the logsumexp of its softmax)."""

Body = Callable[..., Any]
"""``(carry, step, wrap=None) -> (carry, None)``: a group of blocks, whose weights are replaced by ``wrap`` of them."""

INPUT, PRODUCT = "block_input", "product"
"""Further names that "offload" keeps: a block's input, and matmul results of a share of the tokens."""
OFFLOADED = (INPUT, PRODUCT, *RESIDUALS[3:], "residual")


HOST = "@host"
"""Suffix of a value of "save" that is moved to host memory."""
_LEGAL = (
    f"give one of {', '.join(name for name in get_args(Name) if name not in ('save', 'compact'))}, save with different "
    f'values of {", ".join((*GROUPS, *VALUES))} ("save:k+attention"; "save:attention+qkv{HOST}" moves some to the '
    f'host, "input{HOST}" the input), offload with the share of tokens ("offload:0.5"), compact with the '
    'share of elements to keep ("compact:0.25"), or several with their numbers of layers, such as "none=8,full=24".'
)


class RematError(ValueError):
    """Unknown remat policy, or one that does not fit the layers; the message names the legal ones."""


def parse(remat: str) -> tuple[tuple[Policy, int | None], ...]:
    """Parsed policies in the order of layers, each with its number of layers (None for all remaining ones).

    Raises:
        RematError: the text is not a policy or a list of them.
    """
    try:
        policies = parse_by_layers(remat)
    except ValueError as error:
        raise RematError(f"model: remat = {remat!r}; {error}. {_LEGAL}") from None
    if not all(_legal(policy) for policy, _ in policies):
        raise RematError(f"model: remat = {remat!r}; {_LEGAL}")
    return policies


def _legal(policy: Policy) -> bool:
    name, colon, share = policy.partition(":")
    if not colon:
        return name in get_args(Name) and name not in ("save", "compact")
    if name == "save":
        places = _places(policy)
        legal = {(value, moved) for value in VALUES for moved in (False, True)} | {("input", True)}
        return set(places) <= legal and len({value for value, _ in places}) == len(places)
    try:
        return (name == "offload" and 0 <= float(share) <= 1) or (name == "compact" and 0 < float(share) < 1)
    except ValueError:
        return False


def _places(policy: Policy) -> list[tuple[str, bool]]:
    """Values of "save", without groups, each with whether it is moved to the host."""
    found = [(text.removesuffix(HOST), text.endswith(HOST)) for text in policy.partition(":")[2].split("+")]
    return [(value, moved) for name, moved in found for value in GROUPS.get(name, (name,))]


def saved_values(policy: Policy) -> tuple[str, ...] | None:
    """Names in ``VALUES`` that "save" keeps, on the device or on the host; None for other policies."""
    if policy.partition(":")[0] != "save":
        return None
    return tuple(value for value, _ in _places(policy) if value in VALUES)


def moved_values(policy: Policy) -> tuple[str, ...]:
    """Names in ``VALUES`` that "save" moves to the host, and "input" if it moves the block's input."""
    return tuple(value for value, moved in _places(policy) if moved) if policy.startswith("save:") else ()


def saves_names_alone(remat: str) -> bool:
    """Whether a policy, or each of a list of policies, saves the blocks' inputs and named values on the device, and
    nothing else."""
    return all(
        policy in ("full", "attention", "elementwise")
        or (saved_values(policy) is not None and not moved_values(policy))
        for policy, _ in parse(remat)
    )


def on_host(remat: str) -> bool:
    """Whether a policy, or one of a list of policies, moves values to the host."""
    return any(moved_values(policy) or offloaded_share(policy) is not None for policy, _ in parse(remat))


def save_policy(values: Iterable[str], moved: Iterable[str] = ()) -> Policy:
    """Policy that keeps values of ``VALUES``, some of them on the host, in the shortest form; "full" if it keeps none.

    Args:
        values: kept on the device.
        moved: kept on the host; may have "input".
    """
    here, there = set(values), set(moved)
    parts: list[str] = []
    for own, suffix in ((here, ""), (there, HOST)):
        for name in dict.fromkeys((*GROUPS, *VALUES, "input")):
            if (group := set(GROUPS.get(name, (name,)))) <= own:
                parts.append(name + suffix)
                own -= group
    return "save:" + "+".join(parts) if parts else "full"


def check_values(remat: str, known: Container[str]) -> None:
    """Checks that blocks have the values that "save" names, of a group at least one.

    Args:
        remat: policies.
        known: names of values that blocks have.

    Raises:
        RematError: no block has one.
    """
    for policy, _ in parse(remat):
        for text in policy.partition(":")[2].split("+") if policy.startswith("save:") else ():
            name = text.removesuffix(HOST)
            if name != "input" and not any(value in known for value in GROUPS.get(name, (name,))):
                legal = [one for one in VALUES if one in known]
                raise RematError(f"model: remat = {remat!r}: no block has {name!r}; of this model: {', '.join(legal)}.")


def offloaded_share(policy: Policy) -> float | None:
    """Share of tokens whose matmul results "offload" keeps; None for other policies, and for lists of policies."""
    name, _, share = policy.partition(":")
    return float(share or 1) if name == "offload" and _legal(policy) else None


def compact_share(policy: Policy) -> float | None:
    """Share of a matmul input's elements that "compact" keeps; None for other policies."""
    name, _, share = policy.partition(":")
    return float(share) if name == "compact" else None


def policies_by_segment(remat: str, segments: Sequence[tuple[Sequence[Any], int]]) -> list[list[tuple[Policy, int]]]:
    """Policies of each segment in order, each with its number of repeats.

    Args:
        segments: ``DecoderConfig.segments``.

    Raises:
        RematError: the numbers of layers do not add up, or a policy ends inside a group that repeats together.
    """
    policies = parse(remat)
    try:
        pieces = split_by_segment(policies, segments)
    except ValueError as error:
        raise RematError(f"model: remat = {remat!r} {error}") from None
    for name, repeats in (piece for own in pieces for piece in own):
        if name == "sqrt":
            chunks(repeats)
    return pieces


def policies_by_layer(remat: str, segments: Sequence[tuple[Sequence[Any], int]]) -> list[Policy]:
    """Policy of each layer."""
    pieces = zip(segments, policies_by_segment(remat, segments), strict=True)
    return [name for (group, _), own in pieces for name, repeats in own for _ in range(repeats * len(group))]


def chunks(repeats: int) -> tuple[int, int]:
    """Number of runs and repeats per run that "sqrt" uses for ``repeats``; both are near the square root.

    Raises:
        RematError: ``repeats`` is prime, or one.
    """
    a = next(n for n in range(math.isqrt(repeats), 0, -1) if repeats % n == 0)
    if a == 1:
        raise RematError(
            f'model: remat = "sqrt" divides layers into equal runs of several, but {repeats} has no divisor; choose '
            'another number of layers, or "full".'
        )
    return a, repeats // a


def scan(name: Policy, body: Body, carry: Any, xs: Any, repeats: int, unroll: int) -> Any:
    """``jax.lax.scan`` over ``repeats`` of a group of blocks, whose backward pass recomputes as the policy says."""
    if name == "sqrt":
        a, b = chunks(repeats)
        inner = checkpointed("full", body)

        def run(carry: Any, part: Any) -> tuple[Any, None]:
            return jax.lax.scan(inner, carry, part, unroll=min(unroll, b))

        parts = jax.tree.map(lambda x: x.reshape(a, b, *x.shape[1:]), xs)
        return jax.lax.scan(checkpointed("full", run), carry, parts)[0]
    return jax.lax.scan(checkpointed(name, body), carry, xs, unroll=unroll)[0]


def checkpointed(name: Policy, body: Body) -> Any:
    """``body`` (a block or a group of blocks) under ``jax.checkpoint`` with a policy; "sqrt" is treated as "full"."""
    policies = jax.checkpoint_policies
    if name in ("full", "sqrt"):
        return jax.checkpoint(body, prevent_cse=False)
    if name in ("elementwise", "attention"):
        kept = MATMUL_RESULTS if name == "elementwise" else BEFORE_ATTENTION
        return jax.checkpoint(body, prevent_cse=False, policy=policies.save_only_these_names(*kept))
    if (values := saved_values(name)) is not None:
        moved = moved_values(name)
        kept = [one for value in values if value not in moved for one in VALUES[value]]
        if not moved:
            return jax.checkpoint(body, prevent_cse=False, policy=policies.save_only_these_names(*kept))
        away = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=kept,
            names_which_can_be_offloaded=[one for value in moved for one in VALUES.get(value, (INPUT,))],
            offload_src="device",
            offload_dst="pinned_host",
        )
        return jax.checkpoint(_input_named(body) if "input" in moved else body, prevent_cse=False, policy=away)
    if (share := offloaded_share(name)) is not None:
        away = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[*OFFLOADED],
            offload_src="device",
            offload_dst="pinned_host",
        )
        return jax.checkpoint(_named(body, share), prevent_cse=False, policy=away)
    if (share := compact_share(name)) is not None:
        body = _compact(body, share)
    if sharding.axis_size("embed") > 1:
        return jax.checkpoint(body, prevent_cse=False, policy=all_but_gathered_weights)
    return body


def _input_named(body: Body) -> Any:
    """``body`` with its input named."""

    def named(carry: tuple[Array, Any], step: Any, *wrap: Any) -> Any:
        return body((checkpoint_name(carry[0], INPUT), *carry[1:]), step, *wrap)

    return named


def _named(body: Body, share: float) -> Any:
    """``body`` with its input and its matmul results named for "offload"."""
    inner = _input_named(body)

    def named(carry: tuple[Array, Any], step: Any) -> Any:
        return inner(carry, step, lambda weight: _NamedWeight(weight, share))

    return named


@dataclass(frozen=True)
class _NamedWeight:
    """Weight whose matmul results have the name ``PRODUCT`` for a share of the tokens."""

    weight: Array | Weight
    share: float

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dense weight."""
        return self.weight.shape

    def gather(self, dtype: jnp.dtype, axes: LogicalAxes, unreduced_grad: bool) -> _NamedWeight:
        """The weight for use."""
        return replace(self, weight=gather(self.weight, dtype, axes, unreduced_grad))

    def dense(self, dtype: jnp.dtype) -> Array:
        """The dense weight."""
        return dense(self.weight, dtype)

    def project(self, x: Array, out: LogicalAxes, contract: int) -> Array:
        """Matmul of the first ``share`` of the tokens, whose result is named, and of the others; all where it is
        reduce-scattered."""

        def multiply(x: Array) -> Array:
            return project(x, self.weight, out, contract)

        if sharding.is_scattered(self.dense(x.dtype), out, contract=contract):
            return multiply(x)
        first, rest = sharding.split_tokens(x, self.share)
        if not rest.size:
            return checkpoint_name(multiply(x), PRODUCT)
        if not first.size:
            return multiply(x)
        return sharding.join_tokens(checkpoint_name(multiply(first), PRODUCT), multiply(rest))

    def grouped_matmul(self, rows: Array, sizes: Array) -> Array:
        """Grouped matmul with the matrices of experts; its result is not named."""
        return matmul_by_expert(rows, self.weight, sizes)


def draws(remat: str) -> bool:
    """Whether a policy ("compact") draws random numbers, seeded by the batch."""
    return any(compact_share(policy) is not None for policy, _ in parse(remat))


def _compact(body: Body, share: float) -> Any:
    """``body`` whose matmuls keep a random projection of their inputs; ``step`` ends with the number of the repeat."""
    seed = current_batch_seed()
    if seed is None:
        raise RematError(
            f'model: remat = "compact:{share}" seeds its projections from the batch, but the tokens of the batch are '
            "not known here: call Functional.forward."
        )

    def compacted(carry: Any, step: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(seed), step[-1])
        return body(carry, step, lambda weight: CompactWeight(weight, share, key))

    return compacted


def all_but_gathered_weights(primitive: Any, *_: Any, **params: Any) -> bool:
    """``jax.checkpoint`` policy that saves every value but gathered weights: ZeRO-3 all-gathers them again.

    Excludes the named value and the gather (``reshard``) that computes it. ``save_anything_except_these_names`` would
    save the result of the gather, because a name covers its own result only.
    """
    return primitive.name != "reshard" and params.get("name") != sharding.GATHERED_WEIGHT
