"""Layers of a decoder: attention, multi-head latent attention, feed-forward, normalisation, rotary positions."""
