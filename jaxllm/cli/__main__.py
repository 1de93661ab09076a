"""Entry point of ``python -m jaxllm.cli``, which is the ``jaxllm`` command."""

from jaxllm.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
