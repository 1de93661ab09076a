"""Megatron-style checkpoints: a file per tensor and pipeline rank, ``mp_rank_TT/model_optim_rng.pt``.

    rules = parse_rules(Path("megatron.rules").read_text())
    atoms = consolidate(megatron_fragments(Path("run/iter_0000100")), rules)

With pipeline stages the folders are ``mp_rank_TT_PPP``, and each stage counts its layers from 0; here they are numbered
through the model. A parameter that several stages hold, such as tied embeddings, has its fragments of the first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxllm.checkpoint.errors import CheckpointError
from jaxllm.checkpoint.foreign.torch_archive import ArchiveTensor, read_archive

FILES = ("model_optim_rng.pt", "model_rng.pt")
_FOLDER = re.compile(r"mp_rank_(\d+)(?:_(\d+))?")
_LAYER = re.compile(r"(?P<before>(?:.*\.)?layers\.)(?P<layer>\d+)(?P<after>\..*)?")


def megatron_fragments(folder: Path, part: str = "model") -> dict[str, list[ArchiveTensor]]:
    """Fragments of a checkpoint by name, in the order of the tensor ranks; a call of one reads it.

    Args:
        folder: of one iteration, which contains ``mp_rank_...``.
        part: of the files' contents, such as "model" or "optimizer".

    Raises:
        CheckpointError: ranks are missing, or their files are none of Megatron's.
    """
    ranks: dict[int, dict[int, dict[str, ArchiveTensor]]] = {}
    for own in sorted(folder.iterdir()):
        if (found := _FOLDER.fullmatch(own.name)) is not None:
            ranks.setdefault(int(found[2] or 0), {})[int(found[1])] = _tensors(own, part)
    if not ranks:
        raise CheckpointError(f"{folder} has no folders mp_rank_TT or mp_rank_TT_PPP.")
    widths = {stage: sorted(by_rank) for stage, by_rank in ranks.items()}
    complete = list(range(len(next(iter(widths.values())))))
    if sorted(widths) != list(range(len(widths))) or any(found != complete for found in widths.values()):
        raise CheckpointError(f"{folder} lacks ranks: it has {widths} (tensor ranks by pipeline stage).")
    out: dict[str, list[ArchiveTensor]] = {}
    first: dict[str, int] = {}
    for stage in sorted(ranks):
        counts: dict[str, int] = {}
        own_names: dict[str, str] = {}
        for name in ranks[stage][0]:
            found = _LAYER.fullmatch(name)
            if found is None:
                own_names[name] = name
                continue
            stack = found["before"]
            counts[stack] = max(counts.get(stack, 0), int(found["layer"]) + 1)
            own_names[name] = f"{stack}{first.get(stack, 0) + int(found['layer'])}{found['after'] or ''}"
        for name, whole in own_names.items():
            lacking = [rank for rank in complete if name not in ranks[stage][rank]]
            if lacking:
                raise CheckpointError(f"{folder}: stage {stage} has {name} on rank 0, but not on ranks {lacking}.")
            out.setdefault(whole, [ranks[stage][rank][name] for rank in complete])
        for stack, count in counts.items():
            first[stack] = first.get(stack, 0) + count
    return out


def _tensors(folder: Path, part: str) -> dict[str, ArchiveTensor]:
    """Tensors of a rank by dotted name."""
    file = next((folder / name for name in FILES if (folder / name).exists()), None)
    if file is None:
        raise CheckpointError(f"{folder} has neither {' nor '.join(FILES)}.")
    content = read_archive(file)
    if not isinstance(content, Mapping) or part not in content:
        has = ", ".join(map(str, content)) if isinstance(content, Mapping) else type(content).__name__
        raise CheckpointError(f"{file} has no part {part!r}; it has: {has}.")
    return dict(_flat(content[part], ""))


def _flat(tree: Any, prefix: str) -> list[tuple[str, ArchiveTensor]]:
    if isinstance(tree, ArchiveTensor):
        return [(prefix, tree)]
    if not isinstance(tree, Mapping):
        return []
    return [one for key, value in tree.items() for one in _flat(value, f"{prefix}.{key}" if prefix else str(key))]
