"""Sharding: device meshes, rules from logical axes to mesh axes, and operations with sharded results.

Importable on its own; needs JAX only.
"""

import warnings
from typing import Any

from sharding.mesh import AXES as AXES
from sharding.mesh import PRESETS as PRESETS
from sharding.mesh import MeshSpec as MeshSpec
from sharding.mesh import ShardingError as ShardingError
from sharding.ops import GATHERED_WEIGHT as GATHERED_WEIGHT
from sharding.ops import MatmulFn as MatmulFn
from sharding.ops import axis_names as axis_names
from sharding.ops import axis_size as axis_size
from sharding.ops import by_shard as by_shard
from sharding.ops import constrain as constrain
from sharding.ops import current_mesh as current_mesh
from sharding.ops import current_rules as current_rules
from sharding.ops import einsum as einsum
from sharding.ops import fan_out as fan_out
from sharding.ops import gather_for_step as gather_for_step
from sharding.ops import gather_weight as gather_weight
from sharding.ops import is_scattered as is_scattered
from sharding.ops import join_tokens as join_tokens
from sharding.ops import multiply_rows as multiply_rows
from sharding.ops import per_shard as per_shard
from sharding.ops import project as project
from sharding.ops import project_by_shard as project_by_shard
from sharding.ops import project_many as project_many
from sharding.ops import reduce_partial_sums as reduce_partial_sums
from sharding.ops import ring_axis as ring_axis
from sharding.ops import shard_map as shard_map
from sharding.ops import spec as spec
from sharding.ops import split_tokens as split_tokens
from sharding.ops import summed_axes as summed_axes
from sharding.ops import take as take
from sharding.ops import use_mesh as use_mesh
from sharding.ops import use_rules as use_rules
from sharding.ops import whole_rows as whole_rows
from sharding.rules import DEFAULT as DEFAULT
from sharding.rules import LogicalAxes as LogicalAxes
from sharding.rules import Rules as Rules
from sharding.state import abstract_params as abstract_params
from sharding.state import derived_abstract as derived_abstract
from sharding.state import shardings_of as shardings_of

_RENAMED = {
    "Product": "MatmulFn",
    "products": "project_many",
    "scatter_sum": "reduce_partial_sums",
}


def __getattr__(name: str) -> Any:
    """Deprecated names, which go away in the next release."""
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    message = f"sharding.{name} is now sharding.{_RENAMED[name]}; the old name goes away in the next release."
    warnings.warn(message, FutureWarning, stacklevel=2)
    return globals()[_RENAMED[name]]
