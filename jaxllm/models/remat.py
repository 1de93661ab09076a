"""What the backward pass computes again, by name and by layers.

"full"                      every block
"none=8,full=24"            the first 8 layers keep all, the others nothing but their input

none         every intermediate value is kept
elementwise  norms, rotations and activations are computed again, no matrix product
attention    attention itself besides, from kept queries, keys and values, but no product with a weight: the
             selective recomputation of arXiv:2205.05198, whose scores a flash kernel never kept
full         the whole block, from its input (arXiv:1604.06174)
sqrt         runs of about the square root of the layers, from the input of the first, and each block in them from
             its own (arXiv:1604.06174, section 4.1): a and b inputs are kept of a b layers, for a second
             computation of the forward pass
offload      what "elementwise" keeps, and the block's input, wait in the host's memory
offload:0.5  of the products with weights so that half of each row's tokens, and the others' are computed again: the
             block's input, attention's output and what the feed-forward layer adds to wait for all (MEMO,
             arXiv:2407.12117, section 4.1)
compact:0.25 every intermediate value is kept but the inputs of products with weights, of which a random projection to a
             quarter of their numbers is, for an estimate of the weights' gradients (``jaxllm.models.compact_matmul``)
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Literal, get_args

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

import sharding
from jaxllm.models.compact_matmul import CompactMatmul, batch_seed
from pallas_kernels.flash_attention import RESIDUALS

Name = Literal["none", "elementwise", "attention", "full", "sqrt", "offload", "compact"]
Policy = str
"""A ``Name``; of "offload" with the share of tokens where it is not 1, of "compact" with that of kept numbers."""

MATMUL_RESULTS = (*RESIDUALS, "residual", "gate", "up")
"""Names under which a block's matrix products are known to ``jax.checkpoint``: all that "elementwise" keeps."""
BEFORE_ATTENTION = tuple(name for name in MATMUL_RESULTS if name not in RESIDUALS[3:])
"""Of them all but what attention makes: its output and the sums of its softmax."""

INPUT, PRODUCT = "block_input", "product"
"""Names of what "offload" keeps besides: a block's input, and the products of a share of the tokens."""
OFFLOADED = (INPUT, PRODUCT, *RESIDUALS[3:], "residual")


class RematError(ValueError):
    """There is no such policy, or it does not fit the layers; the message says what does."""


def parse(remat: str) -> tuple[tuple[Policy, int | None], ...]:
    """Policies in the order of layers, and the layers of each; None for all that are left.

    Raises:
        RematError: the text says no such thing.
    """
    out: list[tuple[Policy, int | None]] = []
    for part in remat.split(","):
        policy, equals, count = part.strip().partition("=")
        if not _legal(policy) or (equals and not (count.isdigit() and int(count))):
            names = ", ".join(name for name in get_args(Name) if name != "compact")
            raise RematError(
                f"model: remat = {remat!r}; give one of {names}, offload with the share of tokens "
                '("offload:0.5"), compact with that of numbers kept ("compact:0.25"), or several with their numbers of '
                'layers, such as "none=8,full=24".'
            )
        out.append((policy, int(count) if equals else None))
    if len(out) > 1 and any(count is None for _, count in out[:-1]):
        raise RematError(f"model: remat = {remat!r}; only the last policy can be without a number of layers.")
    return tuple(out)


def _legal(policy: Policy) -> bool:
    name, colon, share = policy.partition(":")
    if not colon:
        return name in get_args(Name) and name != "compact"
    try:
        return (name == "offload" and 0 <= float(share) <= 1) or (name == "compact" and 0 < float(share) < 1)
    except ValueError:
        return False


def offloaded_share(policy: Policy) -> float | None:
    """Of which share of tokens "offload" keeps products; None of other policies, and of several by layers."""
    name, _, share = policy.partition(":")
    return float(share or 1) if name == "offload" and _legal(policy) else None


def compact_share(policy: Policy) -> float | None:
    """Of a product's input how many numbers "compact" keeps, as a share; None of other policies."""
    name, _, share = policy.partition(":")
    return float(share) if name == "compact" else None


def policies_by_segment(remat: str, segments: Sequence[tuple[Sequence[Any], int]]) -> list[list[tuple[Policy, int]]]:
    """Of each segment its policies in order, and the repeats of each.

    Args:
        segments: ``DecoderConfig.segments``.

    Raises:
        RematError: layers and policies do not go into each other.
    """
    layers = sum(len(group) * repeats for group, repeats in segments)
    policies = parse(remat)
    counted = sum(count or 0 for _, count in policies)
    rest = layers - counted
    if rest < 0 or (policies[-1][1] is not None and rest) or (policies[-1][1] is None and not rest):
        raise RematError(f"model: remat = {remat!r} is of {counted} layers, and the model has {layers}.")
    names = [name for name, _ in policies]
    left = [rest if count is None else count for _, count in policies]
    out: list[list[tuple[Policy, int]]] = []
    for group, repeats in segments:
        pieces: list[tuple[Policy, int]] = []
        while repeats:
            name, some = names[0], min(repeats, left[0] // len(group))
            if not some:
                raise RematError(f"model: remat = {remat!r} cuts a group of {len(group)} layers that repeat together.")
            if name == "sqrt":
                chunks(some)
            pieces.append((name, some))
            repeats -= some
            left[0] -= some * len(group)
            if not left[0]:
                names, left = names[1:], left[1:]
        out.append(pieces)
    return out


def policies_by_layer(remat: str, segments: Sequence[tuple[Sequence[Any], int]]) -> list[Policy]:
    """Of each layer its policy."""
    pieces = zip(segments, policies_by_segment(remat, segments), strict=True)
    return [name for (group, _), own in pieces for name, repeats in own for _ in range(repeats * len(group))]


def chunks(repeats: int) -> tuple[int, int]:
    """How "sqrt" divides repeats: so many runs, of so many; both near the square root.

    Raises:
        RematError: it is a prime, or one.
    """
    a = next(n for n in range(math.isqrt(repeats), 0, -1) if repeats % n == 0)
    if a == 1:
        raise RematError(f'model: remat = "sqrt" divides layers into runs of several, and {repeats} has no divisor.')
    return a, repeats // a


def scan(name: Policy, body: Any, carry: Any, xs: Any, repeats: int, unroll: int) -> Any:
    """``jax.lax.scan`` over ``repeats`` of a piece, whose backward pass computes again what the policy says."""
    if name == "sqrt":
        a, b = chunks(repeats)
        inner = checkpointed("full", body)

        def run(carry: Any, part: Any) -> tuple[Any, None]:
            return jax.lax.scan(inner, carry, part, unroll=min(unroll, b))

        parts = jax.tree.map(lambda x: x.reshape(a, b, *x.shape[1:]), xs)
        return jax.lax.scan(checkpointed("full", run), carry, parts)[0]
    return jax.lax.scan(checkpointed(name, body), carry, xs, unroll=unroll)[0]


def checkpointed(name: Policy, body: Any) -> Any:
    """A block, or a group of them, under a policy; of "sqrt" as of "full"."""
    policies = jax.checkpoint_policies
    if name in ("full", "sqrt"):
        return jax.checkpoint(body, prevent_cse=False)
    if name in ("elementwise", "attention"):
        kept = MATMUL_RESULTS if name == "elementwise" else BEFORE_ATTENTION
        return jax.checkpoint(body, prevent_cse=False, policy=policies.save_only_these_names(*kept))
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


def _named(body: Any, share: float) -> Any:
    """A block whose input and products are named for "offload"."""

    def by_tokens(multiply: Callable[[Array], Array], x: Float[Array, "B S *in"]) -> Float[Array, "B S *out"]:
        first, rest = sharding.split_tokens(x, share)
        if not rest.size:
            return checkpoint_name(multiply(x), PRODUCT)
        if not first.size:
            return multiply(x)
        return sharding.join_tokens(checkpoint_name(multiply(first), PRODUCT), multiply(rest))

    def named(carry: tuple[Array, Any], step: Any) -> Any:
        with sharding.use_token_split(by_tokens):
            return body((checkpoint_name(carry[0], INPUT), *carry[1:]), step)

    return named


_seed: ContextVar[Array | None] = ContextVar("remat_seed", default=None)


@contextlib.contextmanager
def with_batch_seed(remat: str, tokens: Int[Array, "B S"]) -> Iterator[None]:
    """Traces the body with the batch's seed, where a policy draws by it."""
    if not any(compact_share(policy) is not None for policy, _ in parse(remat)):
        yield
        return
    token = _seed.set(batch_seed(tokens))
    try:
        yield
    finally:
        _seed.reset(token)


def _compact(body: Any, share: float) -> Any:
    """A block, or a group, whose products keep a projection; ``step`` ends with the number of the repeat."""
    seed = _seed.get()
    if seed is None:
        raise RematError(
            f'model: remat = "compact:{share}" draws by the batch, and the batch\'s tokens are not known here.'
        )

    def compacted(carry: Any, step: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(seed), step[-1])
        with sharding.use_matmul(CompactMatmul(share, key)):
            return body(carry, step)

    return compacted


def all_but_gathered_weights(primitive: Any, *_: Any, **params: Any) -> bool:
    """A ``jax.checkpoint`` policy: weights are gathered again for the backward pass, which is what ZeRO-3 means.

    Both the named value and what it names are left out: the gather itself, which ``save_anything_except_these_names``
    would keep, for the name covers its own result only.
    """
    return primitive.name != "reshard" and params.get("name") != sharding.GATHERED_WEIGHT
