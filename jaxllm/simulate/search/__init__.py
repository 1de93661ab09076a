"""Searches over deployments by simulation: engines on one platform, pools, mixes of accelerators."""
