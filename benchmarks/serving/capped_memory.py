"""Decoding under a memory limit that the weights exceed: streamed layers and experts in slots, beside reloading layer
by layer, Accelerate's disk offload and llama.cpp with mmap.

    python -m benchmarks.serving.capped_memory --folder DIR [--model mixture] [--weights int8] [--cap 1.0] [--rounds 3]
        [--llama-cpp PYTHON] [--json FILE]

``mixture`` is a random mixture of 1.2 billion parameters, ``smollm2`` SmolLM2-135M; it is written to the folder in
bfloat16, which Accelerate reads. jaxllm packs the layers in int8, 1.1 GiB of files for the mixture and 0.1 GiB for
SmolLM2, or has them in float32 with ``--weights plain``; with ``--llama-cpp``, an interpreter with xllamacpp and gguf,
the model is written as GGUF in Q8_0 too. Each system runs in a process of its own within a control group whose memory,
page cache included, is limited; before each run the files leave the page cache. One sequence decodes, whose tokens are
drawn at temperature 1. Programs are compiled before, without the limit. Needs Linux, and a control group for memory
that may be written to.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROMPT, STEPS = 16, 16
ARCHITECTURE = {
    "vocab_size": 49152, "hidden_size": 1024, "intermediate_size": 1792, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2,
    "max_position_embeddings": 2048, "tie_word_embeddings": True,
}  # fmt: skip
GIB = 2**30


class CappedGroup:
    """Control group with a memory limit, of either version; an empty one is removed at the end.

    Raises:
        OSError: control groups cannot be made here.
    """

    def __init__(self, limit: int):
        root = Path("/sys/fs/cgroup")
        second = (root / "cgroup.controllers").exists()
        self.path = (root if second else root / "memory") / f"jaxllm-capped-{os.getpid()}"
        self._peak = "memory.peak" if second else "memory.max_usage_in_bytes"
        self.path.mkdir()
        limits = (
            ("memory.max", "memory.swap.max") if second else ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
        )
        try:
            (self.path / limits[0]).write_text(str(limit))
            (self.path / limits[1]).write_text("0" if second else str(limit))  # no swap
        except OSError:
            self.path.rmdir()
            raise

    def run(self, command: list[str], environment: dict[str, str]) -> dict[str, Any]:
        """Last line of a command's output, one of JSON, with the most memory that the group had."""
        enter = lambda: (self.path / "cgroup.procs").write_text("0")  # noqa: E731
        done = subprocess.run(
            command, env=os.environ | environment, capture_output=True, text=True, check=False, preexec_fn=enter
        )
        peak = int((self.path / self._peak).read_text())
        if done.returncode:
            return {"failed": f"ended with {done.returncode}: {done.stderr.strip().splitlines()[-1:]}", "peak": peak}
        return json.loads(done.stdout.strip().splitlines()[-1]) | {"peak": peak}

    def close(self) -> None:
        """Removes it."""
        self.path.rmdir()


def leave_page_cache(folder: Path) -> None:
    """Files of a folder are read from the disk again."""
    os.sync()
    for path in (one for one in folder.rglob("*") if one.is_file()):
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def write_model(folder: Path, model_name: str) -> None:
    """Writes SmolLM2, or the mixture as transformers does, with the tokenizer of SmolLM2."""
    import torch
    import transformers

    from jaxllm.hub import find_model, open_source

    if model_name == "smollm2":
        program = Path(sys.executable).with_name("jaxllm")
        convert = [str(program), "convert", "smollm2", str(folder), "--to", "hf", "--dtype", "bfloat16"]
        subprocess.run(convert, check=True)
        return
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**ARCHITECTURE, dtype="bfloat16")
    with torch.device("cpu"):
        model = transformers.MixtralForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    open_source(find_model("smollm2")).tokenizer.save(folder)


def decode_streamed(folder: Path, offload: str, weights: str) -> float:
    """Tokens per second of an engine whose layers are streamed."""
    from jaxllm.infer import EngineConfig
    from jaxllm.infer.engine.engine import Engine
    from jaxllm.infer.streaming.offload_budget import OffloadBudget
    from jaxllm.infer.streaming.open_streamed import open_streamed
    from jaxllm.infer.streaming.tier_benchmark import decode_step_seconds

    budget = OffloadBudget.parse(offload)
    loaded = open_streamed(str(folder), budget, dtype="float32", weights=weights)
    config = EngineConfig(
        max_sequences=1, max_batched_tokens=16, max_len=PROMPT + 3 * STEPS, pages=8, page_size=16,
        layer_window=budget.window, buckets=(1, 16), samplers=("plain",), prefix_cache=False, decode_steps=1,
    )  # fmt: skip
    engine = Engine.of(loaded.model, loaded.params, config, strict=True, manifest=folder / "programs")
    return 1 / decode_step_seconds(engine, 1, PROMPT, STEPS)


def decode_accelerate(folder: Path) -> float:
    """Tokens per second of transformers with every layer on disk (Accelerate)."""
    import torch
    import transformers

    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    places = {f"model.layers.{n}": "disk" for n in range(layers)}
    ends = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map=ends | places, offload_folder=folder / "accelerate"
    )
    tokens, cache = torch.randint(0, 1000, (1, PROMPT)), None
    seconds = []
    with torch.no_grad():
        for _ in range(1 + STEPS):
            begin = time.perf_counter()
            out = model(tokens, past_key_values=cache, use_cache=True)
            shares = torch.softmax(out.logits[:, -1].float(), -1)  # drawn, so that experts do not repeat themselves
            tokens, cache = torch.multinomial(shares, 1), out.past_key_values
            seconds.append(time.perf_counter() - begin)
    return 1 / statistics.median(seconds[1:])


def is_mixture(folder: Path) -> bool:
    """Whether the model in a folder is the mixture."""
    return "num_local_experts" in json.loads((folder / "config.json").read_text())


def systems(args: argparse.Namespace) -> dict[str, list[str]]:
    """Command of each system."""
    here, folder = [sys.executable, "-m", "benchmarks.serving.capped_memory", "--folder", str(args.folder)], args.folder
    disk = folder / "layers"
    slots = f"window=2,host=0B,disk={disk},experts=2,experts_host=0B,loaders=2"
    mixture = {"jaxllm, experts in slots": slots, "jaxllm, none loaded ahead": f"{slots},ahead=none"}
    found = (mixture if is_mixture(folder) else {}) | {
        "jaxllm, layers, read ahead": f"window=2,host=0B,disk={disk},loaders=2",
        "jaxllm, layers, one at a time": f"window=1,host=0B,disk={disk},loaders=1",
    }
    ours = [*here, "--child", "streamed", "--weights", args.weights]
    commands = {name: [*ours, "--offload", offload] for name, offload in found.items()}
    commands["Accelerate, disk offload"] = [*here, "--child", "accelerate"]
    if args.llama_cpp:
        peer = Path(__file__).with_name("llama_cpp_peer.py")
        commands["llama.cpp, mmap"] = [args.llama_cpp, str(peer), str(folder / "gguf" / "model.gguf"), "1", "128", "2"]
    return commands


def measured(group: CappedGroup, name: str, command: list[str]) -> dict[str, Any]:
    """A run of a system under the limit."""
    if name.startswith("llama.cpp"):  # it decodes when it is told to
        command = ["sh", "-c", f"echo {PROMPT} {STEPS} | {shlex.join(command)}"]
    return group.run(command, {"JAX_PLATFORMS": "cpu"})


def main() -> int:
    """Measures all systems by turns, and prints their medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--model", choices=("mixture", "smollm2"), default="mixture", help="written if DIR has none")
    parser.add_argument("--weights", choices=("int8", "plain"), default="int8", help="how jaxllm holds layers")
    parser.add_argument("--cap", type=float, default=1.0, help="GiB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--llama-cpp", help="an interpreter with xllamacpp and gguf")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=("streamed", "accelerate"))
    parser.add_argument("--offload")
    args = parser.parse_args()
    if args.child:
        streamed = args.child == "streamed"
        folder = args.folder
        speed = decode_streamed(folder, args.offload, args.weights) if streamed else decode_accelerate(folder)
        print(json.dumps({"tokens_per_second": speed}))
        return 0
    if not (args.folder / "config.json").exists():
        write_model(args.folder, args.model)
    if args.llama_cpp and not (args.folder / "gguf" / "model.gguf").exists():
        from jaxllm.hub import find_model

        script = Path(__file__).with_name("llama_cpp_gguf.py")
        subprocess.run([args.llama_cpp, str(script), str(args.folder), str(find_model("smollm2"))], check=True)
    commands = systems(args)
    for command in commands.values():
        if "--offload" in command:  # files of layers are written, and programs compiled
            subprocess.run(command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, check=True, capture_output=True)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in commands}
    for _ in range(args.rounds):
        for name, command in commands.items():
            leave_page_cache(args.folder)
            group = CappedGroup(int(args.cap * GIB))
            try:
                found[name].append(measured(group, name, command))
            finally:
                group.close()
            print(f"{name}: {found[name][-1]}", flush=True)
    for name, runs in found.items():
        speeds = [one["tokens_per_second"] for one in runs if "failed" not in one]
        peak = max(one["peak"] for one in runs) / GIB
        said = f"{statistics.median(speeds):7.2f} ({min(speeds):.2f}-{max(speeds):.2f})" if speeds else "  ended early"
        print(f"{name:32} {said} tokens/s, at most {peak:.2f} of {args.cap:g} GiB")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
