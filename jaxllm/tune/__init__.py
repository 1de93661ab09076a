"""Tuning of kernels with cost models: which block sizes are legal, which to try next, and what is predicted.

``block_solver`` lists the legal blocks, ``trial_search`` proposes which of them to measure, and ``kernel_tuning`` runs
both for the kernels of ``pallas_kernels`` and stores the fastest. ``matmul_cost`` predicts the time of a matmul from
its shape and tiles, ``program_cost`` the FLOPs, bytes and time of a whole program from its StableHLO text.
"""
