"""Mixture-of-experts layers: router, dispatch and experts."""
