"""Test body of flash attention by the Mosaic-GPU kernels: ``flash_body``'s check in a simulation of warpgroups, copies
and barriers, on rows so short that a simulation is quick, and mistakes of these kernels alone.
"""

from __future__ import annotations

from tests.kernels.flash_body import Case, check, small_pieces

__all__ = ["CASES", "KILLERS", "MUTATIONS", "PACKAGE", "check", "small_pieces"]

PACKAGE = "pallas_kernels.flash_attention"
CASES = {
    "one token": Case(1, 1, 1, 1, 1, 2),
    "causal, three heads a kv head": Case(1, 17, 17, 3, 1, 4),
    "packed, two rows": Case(2, 11, 11, 2, 2, 4, "packed"),
    "window": Case(1, 29, 29, 1, 1, 4, window=5),
    "everything": Case(1, 11, 19, 2, 1, 4, "both", v=3, window=9, softcap=1.3, sinks=True),
}
KILLERS = ("packed, two rows", "everything", "causal, three heads a kv head")

MUTATIONS = {
    ("mosaic_gpu", what): ("mosaic_gpu", text, mistake)
    for what, text, mistake in (
        ("keys of the first head", "jax.lax.div(self.head, self.call.group), n", "self.head * 0, n"),
        (
            "queries of another head",
            "self.head * self.call.group + jax.lax.div(n, count)",
            "self.head * self.call.group",
        ),
        ("statistics of another head", "program.head * program.heads + number", "program.head * program.heads"),
        ("rows of another worker", "(self.block * WORKERS + self.worker)", "(self.block * WORKERS)"),
        ("mask of another block", "(block * self.size, shape[1])", "(block * 0, shape[1])"),
        ("blocks that are masked in part", "self._seen(block, products.shape, queries) if masked else None", "None"),
        ("output not scaled again", "out * warpgroup.spread(keep, out.shape, OF_ROWS)", "out"),
        ("sum not scaled again", "total * keep + jnp.sum", "total + jnp.sum"),
        ("forgotten sink", 'if "sink" in program.refs else None', "if False else None"),
        (
            "keys let go before their last matmul",
            'd_q = warpgroup.add_product(d_q, d_products.astype(q.dtype), k)\n        program.release("k", slot)',
            'program.release("k", slot)\n        d_q = warpgroup.add_product(d_q, d_products.astype(q.dtype), k)',
        ),
        (
            "scores not made weights",
            "d_v = warpgroup.add_product(d_v, weights",
            "d_v = warpgroup.add_product(d_v, d_products",
        ),
    )
}
"""(implementation, mistake) -> (module of the package, text, text with the mistake).

None leaves out a wait: the simulation copies at once, and stops with an error of its own, or for good, where barriers
are not waited for in turn.
"""
