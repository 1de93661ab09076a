"""PartitionSpecs of matmul operands and of their gradients, under a mesh of explicit axes."""

from __future__ import annotations

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array


def spec_of(x: Array) -> PartitionSpec | None:
    """Partition spec of an array; None where there is no mesh of explicit axes."""
    return None if jax.sharding.get_abstract_mesh().empty else jax.typeof(x).sharding.spec


def gradient_spec(spec: PartitionSpec | None) -> PartitionSpec | None:
    """Partition spec of the gradient of an array with this spec: partial sums over the axes that it says (``reduced``).

    None for None.
    """
    return None if spec is None else jax.P(*spec.partitions, unreduced=spec.reduced)


def without_reduced(x: Array) -> Array:
    """The same array, less the mark ``reduced`` in its spec: a custom VJP chooses the spec of its gradient itself."""
    spec = spec_of(x)
    return x if spec is None or not spec.reduced else jax.sharding.reshard(x, jax.P(*spec.partitions))
