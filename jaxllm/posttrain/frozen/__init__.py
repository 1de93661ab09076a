"""Training of parts beside a frozen model: retaining heads of its KV cache, and drafts of its self-speculation."""
