"""Texts that tell tokenizers apart, made from a seed."""

import random

# Characters that SentencePiece's U+2581 is not among: a text that has it cannot be told from one with spaces.
_CHARACTERS = "abcdeABCß\u017fK  \t\n\r 0123.,!?/'\"éüñç你好世界🙂👩‍👧привет<>ﬁⅣ½\u0301\u00a0\u3000\u200b"
_WORDS = (
    *(" ", "  ", "    ", "\n", "\n\n", "\r\n", "\t", "x", "é", "e\u0301", "12", "1234567", "'s", "'LL", "Don't"),
    *("HTTPServer", "helloWorld", "the cat sat", "你好", "🙂", "...", "//", "?!\n", "-", "नमस्ते", "aaaa", "hat"),
    *("<s>", "</s>", "<unk>", "<0x41>", "[REF]", "<|endoftext|>", "<|im_end|>", "<b>", "<bos>", "<end_of_turn>"),
)

CORPUS = ["the cat sat on the mat and the hat. helloWorld, 12 34!", "naïve café — 你好世界 привет aaaa  x = 1"] * 30


def texts(seed: int, count: int) -> list[str]:
    draw = random.Random(seed)
    made = ["", " ", "  hi", "hi  "]
    while len(made) < count:
        alphabet, longest = (_CHARACTERS, 30) if draw.random() < 0.5 else (_WORDS, 12)
        made.append("".join(draw.choice(alphabet) for _ in range(draw.randrange(longest))))
    return made
