"""The peer's side of a comparison: transformers + torch, driven by JSON lines on standard input.

    python -m benchmarks.peers.torch_worker [--compiled]

Attention is torch's scaled_dot_product_attention, AdamW the fused one, bf16 autocast over float32 parameters; with
``--compiled`` the model and its loss go through torch.compile. Run by the peer's own interpreter; imports nothing of
jaxllm but ``benchmarks.peers.setting``.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import transformers

from benchmarks.peers import protocol
from benchmarks.peers.setting import Product, Setting


class TorchSide(protocol.Side):
    """Eager."""

    name = "transformers + torch"

    def __init__(self, start: protocol.Start):
        super().__init__(start)
        torch.set_num_threads(start.threads)
        torch.manual_seed(0)
        torch.set_float32_matmul_precision("high")  # on a GPU TF32, as jax does by default; of a CPU no change
        s = self.setting
        if s.precision not in ("float32", "bf16"):
            raise ValueError(f"torch by itself has no precision {s.precision!r}: it is compared in float32 and bf16.")
        self.device = torch.device("cuda" if s.device == "gpu" else "cpu")
        with self.device:
            self.model: Any = _model(s)
            self.tokens = torch.randint(0, s.vocab, (s.batch, s.seq_len))
        if s.remat == "full":
            self.model.gradient_checkpointing_enable()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), s.learning_rate, fused=True)
        self.forward = self.model

    def about(self) -> dict[str, object]:
        """Versions, device and parameter count."""
        parameters = sum(p.numel() for p in self.model.parameters())
        return {
            "name": self.name,
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "parameters": parameters,
        }

    def train(self, steps: int) -> float:
        """Runs training steps and returns the last loss."""
        self.model.train()
        loss = torch.zeros(())
        for _ in range(steps):
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.setting.precision == "bf16"):
                loss = self.forward(input_ids=self.tokens, labels=self.tokens, use_cache=False).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return float(loss.detach())

    def decode(self, batch: int) -> int:
        """Generates tokens for a batch and returns their number."""
        self.model.eval()
        prompt = self.tokens[:1, : self.setting.prompt].expand(batch, -1)
        with torch.no_grad():
            out = self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=self.setting.new_tokens,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
            )
        return (out.shape[1] - prompt.shape[1]) * batch

    def peak_bytes(self) -> int:
        """Peak memory in bytes."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated()
        return super().peak_bytes()

    def product_seconds(self, product: Product) -> float:
        """Seconds of one matmul of the training step alone."""
        a = torch.randn(product.batch, product.rows, product.inner)
        b = torch.randn(product.batch, product.inner, product.columns)
        if product.layout == "TN":
            a = a.mT.contiguous().mT
        if product.layout == "NT":
            b = b.mT.contiguous().mT
        if product.batch == 1:
            a, b = a[0], b[0]

        def run() -> float:
            start = time.perf_counter()
            torch.matmul(a, b)
            return time.perf_counter() - start

        return min(run() for _ in range(protocol.REPEATS))


class CompiledSide(TorchSide):
    """By torch.compile."""

    name = "transformers + torch, compiled"

    def __init__(self, start: protocol.Start):
        super().__init__(start)
        self.forward = torch.compile(self.model)


def _model(s: Setting) -> Any:
    if s.family == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=s.vocab,
            n_positions=1024,
            n_embd=s.hidden,
            n_inner=s.mlp,
            n_layer=s.layers,
            n_head=s.heads,
            tie_word_embeddings=s.tied,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    config = transformers.LlamaConfig(
        hidden_size=s.hidden,
        intermediate_size=s.mlp,
        num_hidden_layers=s.layers,
        num_attention_heads=s.heads,
        num_key_value_heads=s.kv_heads,
        vocab_size=s.vocab,
        max_position_embeddings=max(s.seq_len, s.prompt + s.new_tokens),
        tie_word_embeddings=s.tied,
    )
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


if __name__ == "__main__":
    sys.exit(protocol.serve(CompiledSide if "--compiled" in sys.argv[1:] else TorchSide))
