"""Options as other tools call them: the error gives the name that they have here; none is accepted as an alias."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxllm.cli.errors import UsageError


@dataclass(frozen=True)
class OptionSynonym:
    """Row of the table of synonyms.

    Attributes:
        commands: commands of ``jaxllm`` that people give the words to.
        words: options as other tools spell them; a dash and an underscore are the same.
        option: option or setting here; "" where there is none.
        about: how it is given, or why there is none; a whole phrase or sentence.
    """

    commands: tuple[str, ...]
    words: tuple[str, ...]
    option: str
    about: str = ""


_TRAINING = ("train", "plan", "compile", "shard", "roofline")
_TEXT = ("generate", "chat")
_MODELS = ("generate", "chat", "serve")
SYNONYMS = (
    OptionSynonym(
        _TRAINING, ("--lr", "--learning-rate", "--max-lr", "--peak-lr"), "--optim.schedule.peak",
        "it is the largest learning rate of the schedule",
    ),
    OptionSynonym(
        _TRAINING, ("--epochs", "--num-epochs", "--num-train-epochs"), "--steps",
        "a step reads --data.batch-size rows, and a run says at its start how many rows there are",
    ),
    OptionSynonym(_TRAINING, ("--max-steps", "--iterations", "--num-steps", "--max-iters"), "--steps"),
    OptionSynonym(
        _TRAINING, ("--batch-size", "--bs", "--global-batch-size", "--per-device-train-batch-size"),
        "--data.batch-size", "rows of a step on all devices together; --accumulate splits it into micro-batches",
    ),
    OptionSynonym(
        _TRAINING, ("--seq-length", "--sequence-length", "--max-seq-len", "--max-seq-length", "--block-size",
                    "--context-length"), "--data.seq-len",
    ),
    OptionSynonym(_TRAINING, ("--optimizer", "--optim"), "--optim.kind"),
    OptionSynonym(_TRAINING, ("--lr-scheduler", "--lr-scheduler-type", "--scheduler"), "--optim.schedule.kind"),
    OptionSynonym(
        _TRAINING, ("--warmup", "--warmup-steps", "--warmup-ratio"), "--optim.schedule.warmup", "a share of all steps"
    ),
    OptionSynonym(_TRAINING, ("--weight-decay", "--wd"), "--optim.weight-decay"),
    OptionSynonym(_TRAINING, ("--grad-clip", "--max-grad-norm", "--clip-grad"), "--optim.clip-norm"),
    OptionSynonym(
        _TRAINING, ("--gradient-accumulation-steps", "--grad-accum", "--gradient-accumulation"), "--accumulate"
    ),
    OptionSynonym(_TRAINING, ("--dataset", "--data", "--data-path", "--train-file"), "--data.source"),
    OptionSynonym(_TRAINING, ("--output-dir", "--output", "--save-dir"), "--out", "runs are directories in it"),
    OptionSynonym(_TRAINING, ("--save-steps", "--save-every", "--save-interval"), "--checkpoint.every"),
    OptionSynonym(_TRAINING, ("--eval-steps", "--eval-interval"), "--eval-every"),
    OptionSynonym(_TRAINING, ("--logging-steps", "--log-interval"), "--log-every"),
    OptionSynonym(
        _TRAINING, ("--gradient-checkpointing", "--activation-checkpointing"), "--model.remat", "full recomputes all"
    ),
    OptionSynonym(
        ("train",), ("--resume", "--resume-from-checkpoint"), "--name",
        "a run of the same --name and --out resumes from its last checkpoint by itself",
    ),
    OptionSynonym(_TRAINING, ("--fp16", "--bf16", "--mixed-precision"), "--precision", "such as --precision bf16"),
    OptionSynonym(_TRAINING, ("--lora", "--use-lora", "--use-peft"), "--adapter.kind", "such as --adapter lora"),
    OptionSynonym(_TRAINING, ("--lora-r", "--lora-rank"), "--adapter.rank"),
    OptionSynonym(_TRAINING, ("--lora-alpha",), "--adapter.alpha"),
    OptionSynonym(
        _TRAINING, ("--tp", "--tensor-parallel-size", "--tensor-model-parallel-size"), "--mesh", "such as tensor=2"
    ),
    OptionSynonym(_TRAINING, ("--dp", "--data-parallel-size", "--fsdp"), "--mesh", "such as fsdp=4"),
    OptionSynonym(("serve",), ("--max-model-len", "--ctx-size", "--context-length", "--max-seq-len"), "--max-len"),
    OptionSynonym(
        _MODELS, ("--tensor-parallel-size", "--tp", "--tp-size"), "--mesh",
        "such as tensor=2, over all devices that there are",
    ),
    OptionSynonym(("serve",), ("--data-parallel-size", "--dp", "--dp-size"), "--mesh", "such as data=2,tensor=2"),
    OptionSynonym(
        ("serve",), ("--kv-transfer-config", "--disaggregation-transfer-backend"), "--disaggregation-mode",
        "prefill or decode, with --pools and an address in --disaggregation-bootstrap",
    ),
    OptionSynonym(
        ("serve",), ("--disaggregation-bootstrap-port",), "--disaggregation-bootstrap", "an address, HOST:PORT"
    ),
    OptionSynonym(("serve",), ("--served-model-name", "--alias"), "--name"),
    OptionSynonym(("serve",), ("--max-num-seqs", "--parallel", "--max-running-requests"), "--max-sequences"),
    OptionSynonym(("serve",), ("--max-num-batched-tokens", "--chunked-prefill-size"), "--max-batched-tokens"),
    OptionSynonym(("serve",), ("--kv-cache-dtype", "--cache-type-k"), "--kv-format"),
    OptionSynonym(_MODELS, ("--quantization", "--quantize", "--load-format"), "--weights"),
    OptionSynonym(("serve",), ("--lora-modules", "--enable-lora", "--lora"), "--adapters", "a directory of adapters"),
    OptionSynonym(("serve",), ("--max-loras",), "--adapter-slots"),
    OptionSynonym(("serve",), ("--max-lora-rank",), "--adapter-rank"),
    OptionSynonym(
        ("serve",), ("--api-key",), "--api-key-file",
        "keys do not belong on a command line, which other users can read; $JAXLLM_API_KEY is one too",
    ),
    OptionSynonym(("serve",), ("--tool-call-parser",), "--tool-parser"),
    OptionSynonym(
        ("serve",), ("--enable-auto-tool-choice",), "--tool-parser",
        "tool calls are parsed without a switch; this names the format where the chat template does not tell",
    ),
    OptionSynonym(("serve",), ("--scheduling-policy",), "--policy"),
    OptionSynonym(("serve",), ("--allowed-origins", "--cors-allow-origins"), "--origins"),
    OptionSynonym(
        (*_MODELS, "bench"), ("--speculative-config", "--speculative-model", "--model-draft"), "--speculate",
        "such as draft:MODEL or ngram",
    ),
    OptionSynonym(("serve",), ("--num-speculative-tokens", "--draft-max"), "--speculate-tokens"),
    OptionSynonym(
        ("serve",), ("--enable-prefix-caching", "--enable-chunked-prefill"), "", "both are always on: leave it out"
    ),
    OptionSynonym(
        ("serve",), ("--gpu-memory-utilization", "--mem-fraction-static"), "",
        "the KV cache takes the device memory that is free; --max-len and --max-sequences bound what it needs",
    ),
    OptionSynonym(
        ("serve",), ("--trust-remote-code",), "", "no code of a model's repository is ever run: leave it out"
    ),
    OptionSynonym(_TEXT, ("--max-new-tokens", "--n-predict", "--max-length"), "--max-tokens"),
    OptionSynonym(_TEXT, ("--temp",), "--temperature"),
    OptionSynonym(("generate",), ("--text", "--input"), "--prompt"),
    OptionSynonym(("chat",), ("--prompt", "--user"), "--message"),
    OptionSynonym(("chat",), ("--system-prompt",), "--system"),
    OptionSynonym(
        (*_MODELS, "eval", "inspect"), ("--model", "--model-path", "--model-id"), "",
        "the model is the first word, without an option: jaxllm {command} MODEL",
    ),
    OptionSynonym(("train",), ("--recipe", "--config"), "", "the recipe is the first word: jaxllm train RECIPE"),
    OptionSynonym(("eval",), ("--num-fewshot",), "", "a YAML file of an lm-eval task sets num_fewshot"),
)  # fmt: skip


def check_option_names(command: str, argv: Sequence[str]) -> None:
    """Checks that no option of a command line is another tool's name for one of this command's.

    Raises:
        UsageError: gives the name here.
    """
    table = {word: row for row in SYNONYMS if command in row.commands for word in row.words}
    for word in argv:
        if word == "--":  # what follows is another command
            return
        name = word.partition("=")[0].replace("_", "-")
        if name in table:
            row = table[name]
            about = row.about.format(command=command)
            if not row.option:
                raise UsageError(f"jaxllm {command} has no option {name}: {about}.")
            tail = f": {about}" if about else ""
            raise UsageError(f"jaxllm {command} has no option {name}; it is {row.option} here{tail}.")
