"""Commands of ``jaxllm``, one module each."""
