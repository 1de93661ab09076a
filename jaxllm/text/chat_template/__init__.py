"""Chat templates: rendering conversations as prompts, in a sandbox with limits."""
