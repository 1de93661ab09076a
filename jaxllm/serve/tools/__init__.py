"""Tool calling: tool choice, the call formats of model families, and parsing of calls out of generated text."""
