"""Layers of the decoder: attention, multi-head latent attention, feed-forward, norms, rotary position embedding."""
