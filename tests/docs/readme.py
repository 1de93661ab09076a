"""Commands of README.md and docs/commands.md, with small settings, so that they can be tried.

python -m tests.docs.readme NUMBER    runs one of COMMANDS in the current directory, which it prepares
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.environment import ROOT

SMALL = "--steps 32 --model.layers 1 --data.seq-len 32 --data.batch-size 4 --eval-every 0"
ELSEWHERE = {
    "make": "tried by .ci/run, in a fresh clone",
    "pip": "tried by the Makefile",
    "jaxllm chat ./Qwen3-0.6B": "a model that is not here",
    "jaxllm train llama3_70b": "for a pod",
    "jaxllm compile llama3_70b": "the proof parallelism/pods",
    "jaxllm plan llama3_8b": "minutes of compilers: benchmarks/plan.py; without them, below",
    "jaxllm simulate llama3_70b": "a small one: tests/simulate/test_simulator.py",
    "jaxllm route": "tests/serve/test_gateway_config.py",
    "jaxllm tune flash_attention": "minutes of the TPU's compiler; the parts are in tests/tune",
    "jaxllm serve smollm2": "needs a reader: the proof server/openai_client_on_smollm2",
}
"""Commands that are not tried here, and where they are."""
ADDED = {
    "jaxllm train quickstart": SMALL,
    "jaxllm train ./mine.py:my_run": "",
    "jaxllm train sft_smollm2": "--steps 2 --data.seq-len 64 --data.batch-size 2 --accumulate 1",
    "jaxllm generate": "--max-tokens 5",
    "jaxllm bench": "--prompt 8 --tokens 4 --rounds 1",
    "jaxllm chat smollm2": '--message "Hello" --max-tokens 4',
    "jaxllm launch local": SMALL + " --out together",
}
"""What makes a command small, by its beginning."""


BLOCK = re.compile(r"(<!-- path -->\n)?^```(bash|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def printed() -> list[str]:
    """Every command of README.md and docs/commands.md, without its comment; those of the path are `path`'s."""
    found = []
    text = "".join((ROOT / page).read_text() for page in ("README.md", "docs/commands.md"))
    for is_path, language, block in BLOCK.findall(text):
        for line in block.splitlines() if not is_path else ():
            command = re.sub(r"\s+#.*$", "", line.removeprefix("$ " if language == "console" else ""))
            if command and not command.startswith("#"):
                found.append(command)
    return found


def path(readme: Path) -> list[str]:
    """The commands from a clone to a served model, in their order; one of several lines is one."""
    ((_, _, block),) = [found for found in BLOCK.findall(readme.read_text()) if found[0]]
    joined = block.replace("\\\n", " ").splitlines()
    assert all(line.startswith("$ ") for line in joined), joined
    return [re.sub(r"\s+# .*$", "", line.removeprefix("$ ")) for line in joined]


def elsewhere(command: str) -> str | None:
    """Place where a command is tried that is not tried here."""
    return next((why for start, why in ELSEWHERE.items() if command.startswith(start)), None)


COMMANDS = [command for command in printed() if elsewhere(command) is None]


def prepare(folder: Path) -> None:
    """Files that the commands use: a run, a recipe, questions, a model's file."""
    (folder / "mine.py").write_text(
        "import dataclasses\nfrom jaxllm.models import BlockConfig, DecoderConfig\n"
        "from recipes.quickstart import quickstart\n\n\ndef my_run():\n"
        "    model = DecoderConfig(vocab_size=2048, embed_dim=32, layers=1, pattern=(BlockConfig(),))\n"
        "    run = quickstart()\n    data = dataclasses.replace(run.data, batch_size=8, seq_len=32)\n"
        '    return dataclasses.replace(run, name="mine", model=model, steps=3, data=data, eval_every=0)\n'
    )
    (folder / "mine.jsonl").write_text(
        '{"prompt": "The capital of France is", "choices": [" Paris", " green"], "answer": 0}\n' * 2
    )
    from jaxllm.hub import find_model

    (folder / "model.gguf").symlink_to(find_model("smollm2"))


def run(command: str) -> None:
    """Types a command, with what makes it small; jaxllm is this tree's."""
    for start, words in ADDED.items():
        command = f"{command} {words}" if command.startswith(start) else command
    program, *words = shlex.split(command)
    assert program == "jaxllm", command
    print(f"$ {command}", flush=True)
    devices = {"JAX_NUM_CPU_DEVICES": "8"} if "--mesh" in words else {}
    subprocess.run([sys.executable, "-m", "jaxllm.cli", *words], check=True, env={**os.environ, **devices})


if __name__ == "__main__":
    chosen = COMMANDS[int(sys.argv[1])]
    prepare(Path.cwd())
    if "runs/quickstart" in chosen:
        run("jaxllm train quickstart")
    run(chosen)
