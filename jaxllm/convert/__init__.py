"""Models on disk: load, convert, inspect and upcycle them, whether they are runs or published checkpoints."""
