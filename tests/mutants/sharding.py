"""Mutants of the sharding room."""

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "kv_heads_replicated_where_they_do_not_fit",
        "sharding/rules.py",
        "if name in self.replicable and ways % size == 0:",
        "if name in self.replicable:",
        ("tests/sharding/test_rules.py",),
    ),
    Mutant(
        "two_dimensions_share_an_axis",
        "sharding/rules.py",
        "                if a in used:\n",
        "                if a in used and used[a] == name:\n",
        ("tests/sharding/test_rules.py::test_two_dimensions_cannot_share_a_mesh_axis",),
    ),
    Mutant(
        "outer_open_axis_gets_the_smaller_part",
        "sharding/mesh.py",
        "inner = max(d for d in divisors(rest) if d * d <= rest)",
        "inner = min(d for d in divisors(rest) if d * d >= rest)",
        ("tests/sharding/test_mesh.py::test_open_sizes_share_what_is_left",),
    ),
    Mutant(
        "every_axis_spans_all_slices",
        "sharding/mesh.py",
        ("            rest //= outer[name]\n        if rest > 1:"),
        ("            rest = rest // outer[name] if name == BETWEEN_SLICES[-1] else rest\n        if rest > slices:"),
        ("tests/sharding/test_mesh.py::test_the_outermost_axes_span_slices",),
    ),
    Mutant(
        "gathered_sequence_in_another_order",
        "sharding/collective_matmul.py",
        "start = (here + step) % ring * part",
        "start = (here - step) % ring * part",
        ("tests/sharding/test_collective_matmul.py::test_gathered_products",),
    ),
    Mutant(
        "scattered_sum_arrives_elsewhere",
        "sharding/collective_matmul.py",
        "start = (here - step - 1) % ring * part",
        "start = (here - step) % ring * part",
        ("tests/sharding/test_collective_matmul.py::test_scattered_product",),
    ),
    Mutant(
        "gathered_weights_leave_out_every_axis",
        "sharding/rules.py",
        "whole = gathered and name in self.storage",
        "whole = gathered",
        (
            "tests/sharding/test_rules.py",
            "tests/sharding/test_ops.py::test_gathered_weights_scatter_their_gradient",
        ),
    ),
    Mutant(
        "a_star_sum_is_of_the_last_device",
        "sharding/star_sum.py",
        "        total = total + jax.lax.ppermute(x, axis, [(other, 0)])\n",
        "        total = jax.lax.ppermute(x, axis, [(other, 0)])\n",
        ("tests/sharding/test_star_sum.py::test_it_is_the_sum_on_every_device",),
    ),
]
