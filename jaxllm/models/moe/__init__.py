"""Mixture-of-experts layers: router, dispatch and combine, experts."""
