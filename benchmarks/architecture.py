"""Pictures of docs/architecture.md: the life of a training step and the life of a request, as SVG.

    python -m benchmarks.architecture      rewrites docs/images/life_of_a_step.svg and life_of_a_request.svg

Every box names the files that do its work; tests/docs/test_architecture.py holds that they exist and that the pictures
are the ones this command draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "images"

WIDTH, LEFT, BOX, GAP = 790, 110, 640, 16
LINE, PADDING = 17, 9


@dataclass(frozen=True)
class Box:
    """One stage of a picture.

    Attributes:
        lane: the part of the program that the stage belongs to, written at the left where it changes.
        title: the stage, by the field's term.
        files: the files that do its work.
        note: what is handed on to the next stage; written beside the arrow.
    """

    lane: str
    title: str
    files: tuple[str, ...]
    note: str = ""

    @property
    def height(self) -> int:
        """Height of the box in pixels."""
        return 2 * PADDING + LINE * (1 + len(self.files))


STEP = (
    Box("recipe", "A recipe returns a typed configuration",
        ("recipes/quickstart.py", "jaxllm/cli/commands/train.py, jaxllm/cli/recipe_arguments.py"),
        "RunConfig, with the settings of the command line"),
    Box("run", "The run is built and checked before anything is allocated",
        ("jaxllm/train/config.py, jaxllm/train/run.py", "jaxllm/train/step/step_builder.py, jaxllm/optim/build.py"),
        "mesh, model, optimizer, data, step"),
    Box("run", "Devices: mesh and sharding rules",
        ("sharding/mesh.py, sharding/rules.py, sharding/state.py", "jaxllm/parallel/parallel_config.py"),
        "a sharding for every array of the state"),
    Box("loop", "The loop: prefetched batches in, metrics and checkpoints out",
        ("jaxllm/train/loop.py", "jaxllm/data/loader.py, jaxllm/data/prefetch.py"),
        "TrainState and Batch, both sharded"),
    Box("step", "The training step, compiled once: loss, gradients, update",
        ("jaxllm/train/step/training_step.py, jaxllm/train/step/train_state.py",),
        "parameters and one micro-batch"),
    Box("step", "Loss and gradients; with a stage axis, a pipeline schedule",
        ("jaxllm/train/step/loss.py", "jaxllm/train/step/pipelined_loss.py, jaxllm/parallel/pipeline/pipeline_step.py"),
        "tokens, positions, segments"),
    Box("step", "Forward pass: embed, scanned blocks with remat, head",
        ("jaxllm/models/functional.py, jaxllm/models/decoder.py, jaxllm/models/remat.py",
         "jaxllm/models/layers/attention.py, jaxllm/models/layers/mlp.py, jaxllm/models/moe/moe.py"),
        "q, k, v; hidden states"),
    Box("step", "Kernels: attention, cross-entropy, grouped matmul",
        ("pallas_kernels/flash_attention/api.py, pallas_kernels/ring_attention/api.py",
         "pallas_kernels/cross_entropy/api.py, pallas_kernels/grouped_matmul/api.py"),
        "gradients, reduced over the mesh"),
    Box("step", "Optimizer: clipping, update rule, weight decay, schedule",
        ("jaxllm/optim/build.py, jaxllm/optim/schedules.py",),
        "the next TrainState, and metrics"),
    Box("disk", "Checkpoint: asynchronous, atomic, verified; any mesh to any mesh",
        ("jaxllm/train/recovery/saving.py, jaxllm/checkpoint/checkpointer.py", "jaxllm/train/recovery/resume.py")),
    Box("disk", "Records: metrics, live view, report, receipt",
        ("jaxllm/train/records/recorder.py, jaxllm/observe/html_report.py",)),
)  # fmt: skip

REQUEST = (
    Box("HTTP", "A client posts a request",
        ("jaxllm/serve/app.py, jaxllm/serve/middleware.py", "jaxllm/serve/api/chat_completions.py"),
        "a validated request body"),
    Box("HTTP", "Chat template and tokenizer; sampling parameters",
        ("jaxllm/serve/api/prompt_encoding.py, jaxllm/text/chat_template/chat_template.py",
         "jaxllm/infer/sampling_params.py"),
        "token ids and SamplingParams"),
    Box("HTTP", "Admission, deadlines, cancellation",
        ("jaxllm/serve/generation.py, jaxllm/serve/backend.py", "jaxllm/infer/async_engine.py"),
        "Engine.submit(...)"),
    Box("engine", "The engine: one step is sent while the previous one is read",
        ("jaxllm/infer/engine/engine.py, jaxllm/infer/scheduling/sequence.py",),
        "sequences, waiting and running"),
    Box("engine", "Scheduler: continuous batching, chunked prefill, preemption",
        ("jaxllm/infer/scheduling/scheduler.py, jaxllm/infer/scheduling/policies.py",
         "jaxllm/infer/scheduling/page_allocator.py, jaxllm/infer/scheduling/prefix_cache.py"),
        "StepPlan: a chunk of tokens for each sequence"),
    Box("engine", "Step inputs: one flat batch in one transfer",
        ("jaxllm/infer/engine/step_inputs.py, jaxllm/infer/runner/step/packed_buffer.py",),
        "int32 buffer: tokens, positions, page tables"),
    Box("runner", "Model runner: programs compiled ahead, page pools on the devices",
        ("jaxllm/infer/runner/model_runner.py, jaxllm/infer/runner/program_cache.py",),
        "a compiled program for this many tokens"),
    Box("runner", "Engine step: the forward pass of training over a paged KV cache",
        ("jaxllm/infer/runner/step/engine_step.py, jaxllm/infer/runner/paged_cache.py",
         "jaxllm/models/functional.py, pallas_kernels/paged_attention/api.py"),
        "logits of the rows that sample"),
    Box("runner", "Logits processors and sampler",
        ("jaxllm/infer/runner/logits_processors.py, jaxllm/infer/runner/sampler.py",),
        "tokens and log-probabilities"),
    Box("engine", "Step outputs: detokenizer, stop strings, finish reasons",
        ("jaxllm/infer/engine/step_outputs.py, jaxllm/text/detokenizer.py",
         "jaxllm/infer/engine/stream_output.py"),
        "OutputDelta for each sequence"),
    Box("HTTP", "Server-sent events, or one JSON answer",
        ("jaxllm/serve/api/event_stream.py, jaxllm/serve/tools/output_parser.py",)),
)  # fmt: skip

PICTURES = {"life_of_a_step": ("Life of a training step", STEP), "life_of_a_request": ("Life of a request", REQUEST)}

STYLE = """
text{font:13px system-ui,sans-serif;fill:#1c2733}
.title{font-weight:600}.head{font-size:17px;font-weight:600}
.file{font:12px ui-monospace,monospace;fill:#33506b}
.note{font-size:12px;fill:#6a4a12}.lane{font-weight:600;fill:#5a6b7b}
rect{fill:#f3f7fb;stroke:#8aa5bf}rect.page{fill:#fff;stroke:none}
path{stroke:#8aa5bf;fill:none;stroke-width:1.5}line{stroke:#dbe4ec}
""".replace("\n", "")


def files_of(boxes: tuple[Box, ...]) -> list[str]:
    """Files that a picture names."""
    return [name for box in boxes for line in box.files for name in line.split(", ")]


def draw(title: str, boxes: tuple[Box, ...]) -> str:
    """SVG of a picture: boxes from top to bottom, with arrows between them."""
    y, parts, lane = 54, [], ""
    for number, box in enumerate(boxes):
        if box.lane != lane:
            lane = box.lane
            if number:
                parts.append(f'<line x1="20" x2="{LEFT - 10}" y1="{y - GAP}" y2="{y - GAP}"/>')
            parts.append(f'<text class="lane" x="24" y="{y + PADDING + 13}">{escape(lane)}</text>')
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{BOX}" height="{box.height}" rx="6"/>')
        parts.append(f'<text class="title" x="{LEFT + 12}" y="{y + PADDING + 13}">{escape(box.title)}</text>')
        for row, line in enumerate(box.files, 1):
            at = y + PADDING + 13 + row * LINE
            short = line.replace("jaxllm/", "")
            parts.append(f'<text class="file" x="{LEFT + 12}" y="{at}">{escape(short)}</text>')
        if number + 1 < len(boxes):
            x, top, bottom = LEFT + BOX // 2, y + box.height, y + box.height + 2 * GAP
            parts.append(f'<path d="M{x} {top}V{bottom}m-4 -6l4 6l4 -6"/>')
        if box.note:
            note_y = y + box.height + GAP + 4
            parts.append(f'<text class="note" x="{LEFT + BOX // 2 + 12}" y="{note_y}">{escape(box.note)}</text>')
        y += box.height + 2 * GAP
    head = f'<text class="head" x="24" y="32">{escape(title)}</text>'
    head += (
        f'<text class="note" x="{WIDTH - 40}" y="32" text-anchor="end">files are below jaxllm/ or a top folder</text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}" role="img" '
        f'aria-label="{escape(title)}"><style>{STYLE}</style><rect class="page" width="{WIDTH}" height="{y}"/>'
        f"{head}{''.join(parts)}</svg>\n"
    )


def main() -> None:
    """Writes both pictures."""
    for name, (title, boxes) in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw(title, boxes))
        print(f"written: docs/images/{name}.svg")


if __name__ == "__main__":
    main()
