"""Search of layouts and recomputation by layer (Galvatron, arXiv:2211.13878)."""
