"""Proofs: claims checked many times over, `make proof NAME`, with a sample of each in every test run.

A proof is a function in `tests/proofs/<issue>/*.py`:

    @proof("first_run", count=50, sample=2)
    def kill9_resume(seed: int) -> None:                      # asserts; 50 different seeds

    @proof("first_run", count=200, sample=6, strategy=shapes(), bound=1e-10, float64=True)
    def parity(shape: Shape) -> float:                        # 200 distinct examples; the worst error is kept

    @proof("kernels", cases=CELLS, sample=2)
    def compiles(cell: Cell) -> None:                         # each of them once
"""
