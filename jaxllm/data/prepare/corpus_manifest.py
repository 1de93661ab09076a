"""Corpus manifest: what a prepared corpus is made of; training opens it as a source of tokens.

`OUT/manifest.json` describes the whole corpus, `OUT/SOURCE/manifest.json` one source of it. Each lists its shards,
which are token files, with sizes and hashes; files of origin with hashes and licence; and the number of documents by
rule. A manifest holds no time and no machine, so its bytes are equal whenever the corpus is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.data.prepare.object_cache import list_files, local_copy
from jaxllm.data.sharded_tokens import ShardedTokens, TokenShard, shard_offsets
from jaxllm.data.sources.remote_files import File, RemoteFile
from jaxllm.data.token_files import TokenDocuments
from jaxllm.files import DataError, at, digest, read_json
from jaxllm.text import Tokenizer

FORMAT = "jaxllm-corpus"


def open_corpus(file: File, tokenizer: Tokenizer, cache: Path, name: str | None = None) -> TokenDocuments:
    """Documents of a prepared corpus, by its manifest; local or remote.

    Of the shards only the document offsets are read; tokens are when they are needed.

    Raises DataError naming the manifest or the shard for an invalid, missing, truncated or altered one, or for tokens
    of another tokenizer.
    """
    manifest = read_manifest(file, cache)
    if (made := manifest["tokenizer"]["fingerprint"]) != tokenizer.fingerprint:
        raise DataError(
            f"{at(file)}: made with another tokenizer (fingerprint {made[:12]}) than the one given "
            f"({tokenizer.fingerprint[:12]}); set `tokenizer` to the folder `tokenizer` of the corpus"
        )
    shards = [TokenShard(**{key: one[key] for key in TokenShard.__dataclass_fields__}) for one in manifest["shards"]]
    if not shards:
        raise DataError(f"{at(file)}: the corpus has no documents")
    base = str(file).rpartition("/")[0] or "."
    starts, lengths, first = [], [], 0
    for shard in shards:
        offsets = shard_offsets(shard, base)
        starts.append(first + offsets[:-1])
        lengths.append(np.diff(offsets))
        first += shard.tokens
    tokens = ShardedTokens(shards, base, cache / "shards")
    files = [{"file": one["file"], "documents": one["kept"], "last_row": one["rows"]}
             for source in manifest["sources"] for one in source["files"]]  # fmt: skip
    return TokenDocuments(
        tokens,
        np.concatenate(starts),
        np.concatenate(lengths),
        name or str(file),
        digest([one.sha256 for one in shards]),
        about={"files": files},
    )


def read_manifest(file: File, cache: Path) -> dict[str, Any]:
    """Manifest of a corpus. Raises DataError if the file is not one."""
    remote = isinstance(file, RemoteFile)
    path = local_copy(list_files((file.url,), str(file))[0], cache / "shards") if remote else file
    manifest = read_json(path)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT or manifest.get("version") != 1:
        raise DataError(f"{at(file)}: not the manifest of a corpus ({FORMAT} 1), which `jaxllm data prepare` writes")
    return manifest
