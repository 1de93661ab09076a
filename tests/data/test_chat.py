"""Chat data: the loss mask beside transformers' own; templates that rewrite; preference pairs."""

import json

import numpy as np
import pytest
import transformers

from jaxllm import data
from jaxllm.data.chat_encoding import ChatEncoder
from jaxllm.data.sources.documents import conversation_json
from jaxllm.files import DataError
from jaxllm.hub import find_smollm2, open_source
from jaxllm.text import ByteTokenizer, ChatTemplate, load_tokenizer
from jaxllm.text.bpe_training import train_bpe

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}{% if m.tool_calls %}CALL {{ m.tool_calls | tojson }}{% endif %}<|im_end|>"
    "{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Wie heißt du? 🙂"},
    {"role": "assistant", "content": "Ich heiße Bär. 🐻"},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {"a": 2, "b": 2}}]},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": " Four.  "},
]


@pytest.fixture(scope="module")
def smollm2():
    return open_source(find_smollm2())


def decoded(tokenizer, encoded):
    """Trained spans as text."""
    edges = np.flatnonzero(np.diff(encoded.loss_mask.astype(int), prepend=0, append=0)).reshape(-1, 2)
    return [tokenizer.decode(encoded.ids[a:b], specials=True) for a, b in edges]


def test_ids_and_mask_are_those_of_transformers(smollm2, tmp_path):
    """transformers finds the assistant's part by marks in the template; jaxllm finds the same without marks."""
    tokenizer = smollm2.tokenizer
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    theirs.chat_template = CHATML
    wanted = theirs.apply_chat_template(
        CHAT, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, add_generation_prompt=False
    )
    (got,) = ChatEncoder(tokenizer, ChatTemplate(CHATML)).encode([conversation_json(CHAT)])
    assert got.ids.tolist() == wanted["input_ids"]
    assert got.loss_mask.astype(int).tolist() == wanted["assistant_masks"]
    plain = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    (unmarked,) = ChatEncoder(tokenizer, ChatTemplate(plain)).encode([conversation_json(CHAT)])
    assert unmarked.loss_mask.tolist() == got.loss_mask.tolist()
    said = decoded(tokenizer, got)
    assert said[0] == "Ich heiße Bär. 🐻<|im_end|>"
    assert said[1].startswith("CALL [{")
    assert said[2] == " Four.  <|im_end|>"


def test_a_token_of_two_messages_belongs_to_the_one_it_begins_in(smollm2):
    """The newline that ends the prompt and the one that begins the answer are one token."""
    chat = [CHAT[3], {"role": "assistant", "content": "\n\nx"}]
    (got,) = ChatEncoder(smollm2.tokenizer, ChatTemplate(CHATML)).encode([conversation_json(chat)])
    assert decoded(smollm2.tokenizer, got) == ["\nx<|im_end|>"]


def test_the_real_template(smollm2):
    encoder = ChatEncoder(smollm2.tokenizer, smollm2.template)
    (got,) = encoder.encode([conversation_json(CHAT[1:3])])
    assert decoded(smollm2.tokenizer, got) == ["Ich heiße Bär. 🐻<|im_end|>"]
    assert smollm2.tokenizer.decode(got.ids, specials=True).startswith("<|im_start|>system\nYou are a helpful")


@pytest.mark.parametrize(
    ("template", "chat", "message"),
    [
        (
            # As some templates do with thoughts: an answer loses its beginning when another message follows.
            "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' and not loop.last %}"
            "{{ m.content[3:] }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}[assistant]{% endif %}",
            CHAT[1:4],
            "not prefix-stable: the text before or of message 2 changes",
        ),
        ("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}?{% endif %}",
         CHAT[1:3], "not prefix-stable"),
        (CHATML, CHAT[:2], "no message of the assistant"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused(template, chat, message):
    with pytest.raises(DataError, match=message):
        ChatEncoder(ByteTokenizer(), ChatTemplate(template)).encode([conversation_json(chat)])


def test_a_tokenizer_that_normalises_is_refused(tmp_path):
    tokenizer = train_bpe([" ".join(map(str, range(300)))], 300, where="test")
    tokenizer.save(tmp_path)
    definition = json.loads((tmp_path / "tokenizer.json").read_text())
    definition["normalizer"] = {"type": "Lowercase"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    with pytest.raises(DataError, match=r"the tokenizer normalises the text"):
        ChatEncoder(load_tokenizer(tmp_path), ChatTemplate(CHATML)).encode([conversation_json(CHAT[1:3])])


@pytest.fixture
def chats(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": f"a{n}" * (n % 9 + 1)}]}
        for n in range(40)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def config(folder, **settings):
    base = {"source": str(folder / "a.jsonl"), "content": "chat", "tokenizer": "model", "packing": "documents"}
    return data.DataConfig(
        **(base | {"seq_len": 96, "batch_size": 2, "heldout_fraction": 0.2, "cache_dir": str(folder / "c")} | settings)
    )


def test_rows_of_conversations(chats):
    """Several in a row, only assistant tokens are targets; conversations that are too long are truncated."""
    tokenizer = ByteTokenizer()
    dataset = data.load_dataset(config(chats), tokenizer, ChatTemplate(CHATML))
    targets = ""
    for step in range(40):
        batch = dataset.train.batch_at(step)
        assert batch.targets.min() == -1  # and no wrapped one
        targets += tokenizer.decode(batch.targets[batch.targets >= 0])
        assert batch.segment_ids.max() >= 1
    assert "a7a7a7" in targets
    assert "q" not in targets
    assert dataset.train.plan.padding < 0.5
    held = sum(int((batch.targets >= 0).sum()) for batch in dataset.heldout)
    assert dataset.heldout.target_tokens == held
    short = data.load_dataset(config(chats, seq_len=60), tokenizer, ChatTemplate(CHATML))
    assert "longer than a row are truncated to it" in short.summary
    assert (short.train.plan.row_offsets == np.arange(short.train.plan.rows + 1)).all()


def test_conversations_are_truncated_to_a_row_of_pairs(tmp_path):
    """A row of S pairs has S + 1 tokens of a conversation. Counted by the bytes of the rendered texts, 20 lengths."""
    template, user = ChatTemplate(CHATML), {"role": "user", "content": "q"}
    rows = [[user, {"role": "assistant", "content": "x" * n}] for n in range(1, 21)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    lengths = [len(template.render(row, None, add_generation_prompt=False)) for row in rows]
    prompt = len(template.render([user], None, add_generation_prompt=True))
    seq_len = lengths[12] - 1  # so that conversation 12 just fits, and the seven longer ones do not
    dataset = data.load_dataset(config(tmp_path, seq_len=seq_len, heldout_fraction=0.0), ByteTokenizer(), template)
    assert "; 7 conversations longer than a row are truncated to it" in dataset.summary
    batches = [dataset.train.batch_at(step) for step in range(len(rows) // 2)]
    assert dataset.train.plan.rows == len(rows)
    assert sum(int((batch.targets >= 0).sum()) for batch in batches) == sum(
        min(length, seq_len + 1) - prompt for length in lengths
    )


def test_settings_for_conversations(chats):
    with pytest.raises(ValueError, match=r"data.packing is 'concat', which splits conversations"):
        config(chats, packing="concat")
    with pytest.raises(DataError, match=r"there is no chat template"):
        data.load_dataset(config(chats), ByteTokenizer())
    with pytest.raises(ValueError, match=r"chitchat contains conversations; set data.content='chat'"):
        data.load_dataset(data.DataConfig("chitchat"), ByteTokenizer())


PAIRS = [
    {"prompt": f"p{n}", "chosen": "good" * (n % 4 + 1), "rejected": [{"role": "assistant", "content": "bad"}]}
    for n in range(30)
]


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_preferences(tmp_path, kind):
    rows = PAIRS if kind == "chat" else [row | {"rejected": "bad"} for row in PAIRS]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    template = ChatTemplate(CHATML) if kind == "chat" else None
    tokenizer = ByteTokenizer()
    pairs = data.load_preferences(str(tmp_path / "a.jsonl"), tokenizer, template, seq_len=80, batch_size=4)
    assert pairs.pairs_per_epoch == 30
    batch = pairs.batch_at(3)
    assert isinstance(batch, data.PreferenceBatch)
    for n in range(4):
        prompts = [tokenizer.decode(side.tokens[n][side.segment_ids[n] > 0]) for side in batch]
        name = next(row["prompt"] for row in rows if row["prompt"] + ("<" if kind == "chat" else "g") in prompts[0])
        assert name in prompts[1]
        said = [tokenizer.decode(side.targets[n][side.targets[n] >= 0]) for side in batch]
        assert said[0].startswith("good")
        assert said[1].startswith("bad")
    halves = [pairs.batch_at(3, shard=n, num_shards=2) for n in range(2)]
    assert np.concatenate([half.chosen.tokens for half in halves]).tolist() == batch.chosen.tokens.tolist()
    saved = json.loads(json.dumps(pairs.cursor(5)))
    assert pairs.check_cursor(saved) == 5
    fewer = data.load_preferences(str(tmp_path / "a.jsonl"), tokenizer, template, seq_len=66 if template else 12,
                                  batch_size=4)  # fmt: skip
    assert "longer than a row are skipped" in fewer.summary
    with pytest.raises(data.CursorMismatch, match=r"pairs was 30, is now \d+"):
        fewer.check_cursor(saved)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x", "chosen": "y"}, r"a.jsonl:31: no field 'rejected'"),
        ({"prompt": "x", "chosen": 3, "rejected": "z"}, r"a.jsonl:31: 'chosen' is a int"),
        ({"prompt": "x", "chosen": [], "rejected": "z"}, r"a.jsonl:31: 'chosen' is an empty list"),
        (
            {"prompt": "x", "chosen": [{"role": "user", "content": "y"}], "rejected": "z"},
            r"a.jsonl:31: the conversation has no message of the assistant",
        ),
        ("{", r"a.jsonl:31: not valid JSON"),
    ],
)
def test_preferences_that_are_none(tmp_path, row, message):
    rows = [json.dumps(one) for one in PAIRS] + [row if isinstance(row, str) else json.dumps(row)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    settings = {"seq_len": 90, "batch_size": 2}
    with pytest.raises(DataError, match=message):
        data.load_preferences(str(tmp_path / "a.jsonl"), ByteTokenizer(), ChatTemplate(CHATML), **settings)
    found = data.load_preferences(
        str(tmp_path / "a.jsonl"), ByteTokenizer(), ChatTemplate(CHATML), skip_bad_records=True, **settings
    )
    assert found.bad.count == 1
    assert "1 bad records skipped" in found.summary
