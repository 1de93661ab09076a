"""Side-by-side comparison: workers that do the same work with jaxllm and with a peer, in turns."""
