"""Bundled corpus: 23 plays of Shakespeare, a few MB of real text, so that a first run needs no download.

README.md and LICENSE in this folder state its origin, its licence and how it was built. A document is a scene. Two
whole plays are always held out: *Twelfth Night* and *Macbeth*, one comedy and one tragedy.
"""

from pathlib import Path

NAME = "shakespeare"  # the value of `DataConfig.source` that selects this corpus

SEPARATOR = "<|endoftext|>"  # stands on a line of its own between two documents

SHA256 = {
    "train": "2c1ca9c7ea40d4600da416f43fb1f9ead9f2c74af68924041464023161cbd24a",
    "heldout": "18929f5b18b355415bb316b40abad467b6d250ce5854a13deffd23e1a3a35383",
}

HELDOUT_PLAYS = ("comedies/twelfth-night", "tragedies/macbeth")

TRAIN_PLAYS = (
    "comedies/a-midsummer-night-s-dream",
    "comedies/as-you-like-it",
    "comedies/love-s-labours-lost",
    "comedies/much-ado-about-nothing",
    "comedies/the-comedy-of-errors",
    "comedies/two-gentlemen-of-verona",
    "histories/henry-iv-part-1",
    "histories/henry-v",
    "histories/richard-ii",
    "histories/richard-iii",
    "problems/measure-for-measure",
    "problems/the-merchant-of-venice",
    "problems/the-taming-of-the-shrew",
    "roman/antony-and-cleopatra",
    "roman/julius-caesar",
    "romances/a-winter-s-tale",
    "romances/the-tempest",
    "tragedies/hamlet",
    "tragedies/king-lear",
    "tragedies/othello",
    "tragedies/romeo-and-juliet",
)


def path(split: str) -> Path:
    """Path of the file of one split, `train` or `heldout`."""
    return Path(__file__).with_name(f"{split}.txt")
