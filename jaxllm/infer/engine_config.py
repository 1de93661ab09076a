"""Engine configuration: batch size, token budget per step, KV cache size and format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from jaxllm.config import ConfigError, renamed_fields
from jaxllm.infer.pools.pool_argument import are_attention_pools, parse_pools
from jaxllm.infer.scheduling.phase_split import phase_split

SamplerKind = Literal["plain", "full"]
DRAFT_TOKENS = 4
"""Draft tokens of a step of speculative decoding, unless another number is given."""
KvDtype = str
"""Name of what KV cache pages hold, see ``EngineConfig.kv_dtype``."""


@renamed_fields(sequences="max_sequences", budget="max_batched_tokens", loop="decode_steps")
@dataclass(frozen=True)
class EngineConfig:
    """Sizes of an engine. Every program is compiled for them before the first request, and none after it.

    Attributes:
        max_sequences: sequences that are in a batch at a time; more wait.
        max_batched_tokens: token budget of a step: one token of each decoding sequence, the rest for prefill.
        max_len: maximum tokens of a sequence, prompt included; None: the length that the model was trained on.
        page_size: positions of a KV cache page, rounded up to a multiple of 128 on TPUs if its format has scales; None:
            a page holds a whole sequence, so that the KV cache of a sequence is contiguous, for few and long sequences
            (the case of vAttention, arXiv:2405.04437).
        pages: pages in the pool of layers without a sliding window; None: as many as device memory has room for, see
            ``Engine``.
        buckets: token counts that steps with prefill are padded to; the largest is max_batched_tokens. None: each is
            four times the one before.
        decode_steps: tokens that each sequence decodes on the device in one step, while no request waits.
        prefix_cache: requests with a common prefix share its KV cache pages.
        phase_split: how many tokens a step has for prompts while sequences decode: "whole": all that decoding leaves;
            "half": as many as double the time of decoding; "tpot:SECONDS": as many as keep a step to that time;
            "nexus:WEIGHT": those that make prompts and output tokens wait least together, see
            ``jaxllm.infer.scheduling.phase_split``.
        preemption: "recompute" the KV cache of a preempted sequence later, or "swap" it to the host.
        batch_invariant: a request gets the same bits whatever it is batched with: all steps run one program, and
            prompts are split into chunks at fixed positions.
        samplers: samplers to compile: "plain" (temperature, seed), "full" (filters, logits processors and
            log-probabilities too).
        top_logprobs: upper limit of ``SamplingParams.logprobs``.
        kv_dtype: dtype of the KV cache: "auto": the model's compute dtype; "bfloat16"; "int8" or "fp8" (float8_e4m3fn),
            which have a float32 scale for each token's key and one for its value, per kv head; "int4", "bfp4", "kivi4",
            "kivi2", "shadowkv:RANK,TOKENS,OUTLIERS" (docs/serve/kv_cache.md); or another quantised row of
            ``pallas_kernels.paged_attention.kv_formats.KV_FORMATS``.
        retention: row of ``jaxllm.infer.runner.paged_cache.RETENTION_RULES``: a rule that decides which tokens leave
            the KV cache of the layers without a sliding window, with its sizes, such as "window+sinks:1024,4"; None:
            all stay.
        head_clusters: kv heads that share one's queries and keys, in clusters of so many, see
            ``jaxllm.infer.runner.retention.chai``; 1: each has its own.
        chunk_cache: requests may name parts of their prompts whose keys and values are reused at any position, see
            ``SamplingParams.cached_chunks``.
        two_phase: decode steps read the pages that sequences begin with in common once for all of them, see
            ``pallas_kernels.paged_attention.shared_pages``.
        star_bytes: on a mesh with ``tensor``, most bytes of a sum of the shards' results that goes through one device,
            in two messages one after the other (``sharding.star_sum``), for links whose latency rules; larger sums are
            the compiler's all-reduces.
        overlap: on a mesh with ``tensor``, the rows of a step go through each layer in two halves, so that the matmuls
            of one half do not wait for the all-reduces of the other: "iso": of steps with prompts; "nano": of decode
            steps of several sequences too (``jaxllm.infer.runner.step.step_halves``); "none". With an attention pool,
            "nano": the attention devices have one half of a step while the weights' devices have the other.
        mla: on a mesh with ``tensor``: "exact": latents of multi-head latent attention are repeated on its devices;
            "tpla", "tpla:hadamard", "tpla:pca" or "tpla:none": each has a slice, and generated tokens attend to the
            slices one by one, which is an approximation; behind the colon the rotation that is folded into the weights,
            "pca" by default (``jaxllm.infer.runner.latent_rotation``).
        kv_span: on a mesh with ``context``: the pages of a request are spread over its devices, so that a sequence may
            be longer than one device has pages for (``jaxllm.infer.runner.kv_span``); ``pages`` are those of each
            device. False: each has all pages.
        kv_host_gib: GiB of host memory for pages that the prefix cache evicts on the device, see ``page_store``.
        kv_disk: directory for those that leave host memory, where they are found after a restart; None: none.
        kv_disk_gib: most GiB there.
        speculate: proposer of speculative decoding: a row of ``jaxllm.infer.speculate.proposer_table.PROPOSERS`` with
            its argument, such as "ngram:4"; None: none, or that of ``Engine(proposer=)``.
        draft_length: with ``speculate``: "adaptive": drafts have up to ``verify_tokens`` tokens, as many as acceptance
            and the measured times of steps make worthwhile, or none; "fixed": as many as there are rows for.
        verify_tokens: most proposed tokens of a sequence that one step verifies; steps with prefill compute the logits
            of one row more than these. 0: none, or with ``speculate`` as many as ``DRAFT_TOKENS``.
        draft_trees: drafts may be trees of up to ``verify_tokens`` tokens, and steps with prefill have a tree mask;
            ``speculate`` sets it as its proposer needs. Their number is fixed.
        draft_features: the hidden states of all tokens of a batch stay on the device, for a draft head; ``speculate``
            sets it as its proposer needs.
        adapter_slots: LoRA adapters that can be on the device at a time, and so in one step; more wait on the host. 0:
            none, and programs are those of an engine that knows no adapters.
        adapter_rank: largest rank of an adapter.
        adapter_page_ranks: ranks of a page of the pool of adapters, to which an adapter's rank is rounded up. 16 is the
            least for the kernel of GPUs; on a CPU, the rank of the adapters costs least.
        adapter_pages: pages of the pool of adapters; None: as many as all slots take with the largest rank.
        layer_window: with ``StreamedWeights``: layers that are on the device at a time, besides those that stay there
            (``jaxllm.infer.streaming``); 0: all weights are on the device. A step decodes one token of a sequence.
        stages: pipeline stages that the model's layers are cut into (``jaxllm.infer.stages``): as many as the mesh's
            ``stage`` axis, by which ``Engine.of`` sets it. A step decodes one token of a sequence.
        draft_runs: with ``stages`` and ``speculate``: runs of a sequence that may be in flight, each of up to
            ``verify_tokens`` draft tokens (PipeInfer); 1: the next draft waits for the verification of the one before.
        pools: prefill and decode on engines of their own, such as "prefill=tensor:2 x1, decode=tensor:4 x1", see
            ``PoolSizes``; the other sizes are those of each engine. Or weights and attention on devices of their own,
            such as "model=tensor:2, attention=tensor:4", see ``AttentionPoolSizes``; a step then decodes one token of a
            sequence. None: every engine does all on the same devices.
    """

    max_sequences: int = 16
    max_batched_tokens: int = 256
    max_len: int | None = None
    page_size: int | None = 32
    pages: int | None = None
    buckets: tuple[int, ...] | None = None
    decode_steps: int = 8
    prefix_cache: bool = True
    preemption: Literal["recompute", "swap"] = "recompute"
    phase_split: str = "whole"
    batch_invariant: bool = False
    samplers: tuple[SamplerKind, ...] = ("plain", "full")
    top_logprobs: int = 5
    kv_dtype: KvDtype = "auto"
    retention: str | None = None
    head_clusters: int = 1
    chunk_cache: bool = False
    two_phase: bool = False
    star_bytes: int = 0
    overlap: Literal["none", "iso", "nano"] = "none"
    mla: str = "exact"
    kv_span: bool = False
    kv_host_gib: float = 0.0
    kv_disk: str | None = None
    kv_disk_gib: float = 64.0
    speculate: str | None = None
    draft_length: Literal["adaptive", "fixed"] = "adaptive"
    verify_tokens: int = 0
    draft_trees: bool = False
    draft_features: bool = False
    adapter_slots: int = 0
    adapter_rank: int = 64
    adapter_page_ranks: int = 16
    adapter_pages: int | None = None
    layer_window: int = 0
    stages: int = 1
    draft_runs: int = 1
    pools: str | None = None

    def __post_init__(self) -> None:
        self._check_adapters()
        for name in ("max_sequences", "max_batched_tokens", "max_len", "page_size", "pages", "decode_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"engine: {name} = {value}; give 1 or more.")
        if self.max_batched_tokens < self.max_sequences:
            raise ConfigError(
                f"engine: max_batched_tokens = {self.max_batched_tokens} is less than max_sequences = "
                f"{self.max_sequences}; every sequence decodes one token per step."
            )
        if self.top_logprobs < 1:
            raise ConfigError(f"engine: top_logprobs = {self.top_logprobs}; give 1 or more.")
        if not self.samplers or not set(self.samplers) <= {"plain", "full"}:
            raise ConfigError(f"engine: samplers = {self.samplers}; legal: a tuple of 'plain' and 'full'.")
        if self.preemption not in ("recompute", "swap"):
            raise ConfigError(f"engine: preemption = {self.preemption!r}; legal: 'recompute', 'swap'.")
        phase_split(self.phase_split)
        name = self.kv_dtype.partition(":")[0]
        if self.kv_dtype not in ("auto", "bfloat16") and name not in (rows := _quantised_formats()):
            raise ConfigError(f"engine: kv_dtype = {self.kv_dtype!r}; legal: {('auto', 'bfloat16', *rows)}.")
        if self.residual_window:
            self._check_whole_pages()
        if self.values_on_host:
            self._check_host_values()
        self._check_clusters()
        self._check_chunks()
        self._check_two_phase()
        self._check_overlap()
        self._check_mla()
        self._check_span()
        if self.orders_channels and self.adapter_slots:
            raise ConfigError(
                f"engine: kv_dtype = {self.kv_dtype!r} reorders the model's channels, and adapters are for its own "
                "order: use kivi4 or int4 with adapter_slots."
            )
        if min(self.kv_host_gib, self.kv_disk_gib) < 0:
            raise ConfigError(
                f"engine: kv_host_gib = {self.kv_host_gib} and kv_disk_gib = {self.kv_disk_gib}; give GiB."
            )
        if self.has_tiers and not self.prefix_cache:
            raise ConfigError(
                "engine: kv_host_gib and kv_disk keep pages of the prefix cache, and prefix_cache = False (a retention "
                "rule needs that); leave them out."
            )
        if self.draft_length not in ("adaptive", "fixed"):
            raise ConfigError(f"engine: draft_length = {self.draft_length!r}; legal: 'adaptive', 'fixed'.")
        if self.retention is not None and self.prefix_cache:
            raise ConfigError(
                f"engine: retention = {self.retention!r} needs prefix_cache = False: entries of a page change after it "
                "is full, so no other request can share it."
            )
        if self.speculate is not None and not self.verify_tokens:
            object.__setattr__(self, "verify_tokens", min(DRAFT_TOKENS, self.max_batched_tokens - 1))
        if not 0 <= self.verify_tokens < self.max_batched_tokens:
            raise ConfigError(
                f"engine: verify_tokens = {self.verify_tokens}; give 0 (none) to {self.max_batched_tokens - 1}, less "
                "than max_batched_tokens."
            )
        if self.buckets is not None and (
            list(self.buckets) != sorted(set(self.buckets))
            or not self.buckets
            or self.buckets[-1] != self.max_batched_tokens
            or self.buckets[0] < 1
        ):
            raise ConfigError(
                f"engine: buckets = {self.buckets}; give rising token counts, the last of them max_batched_tokens "
                f"({self.max_batched_tokens})."
            )
        if self.batch_invariant:
            self._check_invariant()
        if self.draft_trees:
            self._check_trees()
        if self.draft_features and (self.draft_trees or self.preemption == "swap"):
            other = "draft_trees" if self.draft_trees else "preemption = 'swap'"
            raise ConfigError(f"engine: the features of a draft head (draft_features) do not go with {other}.")
        self._check_streamed()
        self._check_stages()
        if self.pools is not None:
            self._check_pools(self.pools)

    def _check_pools(self, pools: str) -> None:
        """Checks what goes with pools."""
        parse_pools(pools)
        apart = not self.offloads_attention
        wrong = {
            f"speculate = {self.speculate!r}": self.speculate is not None,
            f"verify_tokens = {self.verify_tokens} (speculation)": self.verify_tokens > 0,
            f"adapter_slots = {self.adapter_slots}": self.adapter_slots > 0,
            f"layer_window = {self.layer_window} (streamed weights)": self.layer_window > 0,
            f"stages = {self.stages} (a mesh with stage)": self.stages > 1,
            f"retention = {self.retention!r}": self.retention is not None,
            f"kv_dtype = {self.kv_dtype!r}, which encodes whole pages,": self.residual_window > 0,
            f"kv_dtype = {self.kv_dtype!r}, which reorders channels,": self.orders_channels,
            f"kv_host_gib = {self.kv_host_gib}": self.kv_host_gib > 0,
            f"kv_disk = {self.kv_disk!r}": self.kv_disk is not None,
            "batch_invariant (one program for all steps)": self.batch_invariant,
            f"phase_split = {self.phase_split!r} (no step has both phases)": apart and self.phase_split != "whole",
            "overlap = 'iso' (give 'nano', which halves all steps)": self.overlap == "iso",
        }
        for name in (name for name, is_so in wrong.items() if is_so):
            raise ConfigError(f"engine: {name} does not go with pools = {pools!r}: leave one of them out.")

    def _check_stages(self) -> None:
        """Checks what goes with pipeline stages."""
        if min(self.stages, self.draft_runs) < 1:
            raise ConfigError(f"engine: stages = {self.stages} and draft_runs = {self.draft_runs}; give 1 or more.")
        if self.draft_runs > 1 and not self.verify_tokens:
            raise ConfigError(f"engine: draft_runs = {self.draft_runs} without speculate; give draft:MODEL or ngram.")
        if self.draft_runs > 1 and self.residual_window:
            raise ConfigError(
                f"engine: draft_runs = {self.draft_runs} does not go with kv_dtype = {self.kv_dtype!r}, which encodes "
                "whole pages: drafts of several runs may be refused. Use int8, fp8, int4 or bfp4 with that."
            )
        if self.stages == 1:
            return
        proposer = (self.speculate or "").partition(":")[0]
        wrong = {
            f"layer_window = {self.layer_window} (streamed weights)": self.layer_window > 0,
            f"adapter_slots = {self.adapter_slots}": self.adapter_slots > 0,
            f"retention = {self.retention!r}": self.retention is not None,
            f"kv_disk = {self.kv_disk!r}": self.kv_disk is not None,
            "draft_trees (a tree of draft tokens)": self.draft_trees or proposer == "tree",
            "draft_features (a draft head)": self.draft_features or proposer in ("head", "mtp"),
            f"speculate = {self.speculate!r}, which drafts with the model's own layers,": proposer == "self",
        }
        for name in (name for name, is_so in wrong.items() if is_so):
            raise ConfigError(
                f"engine: {name} does not go with stages = {self.stages} (a mesh with stage): leave it out, or split "
                "heads over tensor instead of layers over stage. To speculate with stages, use draft:MODEL or ngram."
            )

    def _check_streamed(self) -> None:
        if self.layer_window < 0:
            raise ConfigError(f"engine: layer_window = {self.layer_window}; give 1 or more, or 0 for none.")
        wrong = {
            f"kv_disk = {self.kv_disk!r}": self.kv_disk is not None,
            "draft_features (a draft head, speculate = 'head:...' or 'mtp')": self.draft_features,
        }
        legal = "; to speculate, use draft:MODEL, tree:MODEL,BUDGET or ngram" if self.draft_features else ""
        for name in (name for name, is_so in wrong.items() if is_so and self.layer_window):
            raise ConfigError(
                f"engine: {name} does not go with layer_window = {self.layer_window} (streamed weights): leave one of "
                f"them out{legal}."
            )

    def _check_trees(self) -> None:
        """Checks what goes with trees of draft tokens."""
        if not self.verify_tokens:
            raise ConfigError("engine: draft_trees without verify_tokens; give the most tokens of a tree.")
        wrong = {
            f"retention = {self.retention!r}": self.retention is not None,
            f"kv_dtype = {self.kv_dtype!r}": bool(self.residual_window),
        }
        for name in (name for name, is_so in wrong.items() if is_so):
            raise ConfigError(
                f"engine: a tree of draft tokens (draft_trees, speculate = 'tree:...') does not go with {name}: its "
                "branches share slots of the KV cache in no order of positions. Use draft:MODEL, or leave that out."
            )

    @property
    def has_tiers(self) -> bool:
        """Whether there are tiers of the KV cache behind the device."""
        return self.kv_host_gib > 0 or self.kv_disk is not None

    @property
    def residual_window(self) -> int:
        """Latest tokens of a sequence in full precision, where the KV cache format encodes whole pages; else 0."""
        return 0 if (form := self._kv_format) is None else form.residual

    @property
    def values_on_host(self) -> bool:
        """Whether the KV cache format keeps the elements of pages in host memory."""
        return (form := self._kv_format) is not None and form.on_host

    @property
    def _kv_format(self) -> Any:
        """KV cache format of its own; None where pages have values of a dtype."""
        if self.kv_dtype in ("auto", "bfloat16"):
            return None
        # Imported here: configurations are read without importing JAX.
        from pallas_kernels.paged_attention.kv_formats import kv_format

        return kv_format(self.kv_dtype)

    @property
    def orders_channels(self) -> bool:
        """Whether the KV cache format wants the channels of keys and values in the order of their sizes."""
        return (form := self._kv_format) is not None and form.orders_channels

    def _check_whole_pages(self) -> None:
        """Checks what goes with a format that encodes a page at once, behind the latest tokens."""
        wrong = {
            "preemption = 'swap'": self.preemption == "swap",
            "batch_invariant": self.batch_invariant,
            f"retention = {self.retention!r}": self.retention is not None,
            "page_size = None": self.page_size is None,
        }
        for name in (name for name, is_so in wrong.items() if is_so):
            raise ConfigError(
                f"engine: kv_dtype = {self.kv_dtype!r} encodes whole pages behind the latest tokens, which are in full "
                f"precision elsewhere; it does not go with {name}. Use int8, fp8, int4 or bfp4 with that."
            )
        if self.page_size is not None and self.verify_tokens > self.page_size:
            raise ConfigError(
                f"engine: kv_dtype = {self.kv_dtype!r} has room for page_size = {self.page_size} draft tokens, not "
                f"verify_tokens = {self.verify_tokens}."
            )

    def _check_host_values(self) -> None:
        """Checks what goes with a format whose values are in host memory, and of which a query reads chosen chunks."""
        proposes = self.verify_tokens > 0 or self.speculate is not None
        wrong = {
            f"speculate = {self.speculate!r} and verify_tokens = {self.verify_tokens}": proposes,
            f"head_clusters = {self.head_clusters} (chai)": self.head_clusters > 1,
            f"layer_window = {self.layer_window} (streamed weights)": self.layer_window > 0,
            f"stages = {self.stages} (a mesh with stage)": self.stages > 1,
            "kv_host_gib and kv_disk, tiers of pages that are on the device": self.has_tiers,
        }
        for name in (name for name, is_so in wrong.items() if is_so):
            raise ConfigError(
                f"engine: kv_dtype = {self.kv_dtype!r} keeps values in host memory; it does not go with {name}. Leave "
                "one of them out, or use kivi4 or int4 with that."
            )

    def _check_clusters(self) -> None:
        """Checks what goes with clustered heads, which are folded into the weights when the engine starts."""
        if self.head_clusters < 1:
            raise ConfigError(f"engine: head_clusters = {self.head_clusters}; give 2 or more, or 1 for none.")
        wrong = {
            f"adapter_slots = {self.adapter_slots}, adapters of the model's own heads": self.adapter_slots > 0,
            f"layer_window = {self.layer_window} (streamed weights)": self.layer_window > 0,
            f"pools = {self.pools!r}": self.pools is not None,
            f"kv_dtype = {self.kv_dtype!r}, which reorders the channels of plain heads": self.orders_channels,
            f"retention = {self.retention!r}, with heads of the plain model": (self.retention or "").startswith(
                "locret"
            ),
        }
        for name in (name for name, is_so in wrong.items() if is_so and self.head_clusters > 1):
            raise ConfigError(
                f"engine: {name}, does not go with head_clusters = {self.head_clusters} (chai): leave one of them out."
            )

    def _check_chunks(self) -> None:
        """Checks what goes with cached chunks, whose pages the prefix cache keeps."""
        wrong = {
            "prefix_cache = False (a retention rule needs that)": not self.prefix_cache,
            f"kv_dtype = {self.kv_dtype!r}, which encodes whole pages": bool(self.residual_window),
            "batch_invariant": self.batch_invariant,
            f"layer_window = {self.layer_window} (streamed weights)": self.layer_window > 0,
            f"stages = {self.stages}": self.stages > 1,
            f"pools = {self.pools!r}": self.pools is not None,
            "draft_features (a draft head)": self.draft_features,
        }
        for name in (name for name, is_so in wrong.items() if is_so and self.chunk_cache):
            raise ConfigError(f"engine: chunk_cache does not go with {name}; leave one of them out.")

    def _check_two_phase(self) -> None:
        """Checks what goes with attention in two phases, the first of which is of several sequences."""
        wrong = {
            f"retention = {self.retention!r}": self.retention is not None,
            f"kv_dtype = {self.kv_dtype!r}, which encodes whole pages": bool(self.residual_window),
            "batch_invariant": self.batch_invariant,
            f"layer_window = {self.layer_window} (streamed weights)": self.layer_window > 0,
            f"stages = {self.stages}": self.stages > 1,
            f"pools = {self.pools!r}": self.pools is not None,
        }
        for name in (name for name, is_so in wrong.items() if is_so and self.two_phase):
            raise ConfigError(f"engine: two_phase does not go with {name}; leave one of them out.")

    def _check_overlap(self) -> None:
        """Checks what goes with steps in two halves."""
        if self.star_bytes < 0 or (self.star_bytes and (self.stages > 1 or self.pools is not None)):
            other = f"stages = {self.stages}" if self.stages > 1 else f"pools = {self.pools!r}"
            raise ConfigError(
                f"engine: star_bytes = {self.star_bytes}; give 0 or more"
                + (f", and 0 with {other}." if self.star_bytes > 0 else ".")
            )
        if self.overlap not in ("none", "iso", "nano"):
            raise ConfigError(f"engine: overlap = {self.overlap!r}; legal: 'none', 'iso', 'nano'.")
        wrong = {
            f"adapter_slots = {self.adapter_slots}, adapters by row": self.adapter_slots > 0,
            f"retention = {self.retention!r}": self.retention is not None,
            f"kv_dtype = {self.kv_dtype!r}, which encodes whole pages": bool(self.residual_window),
            "batch_invariant": self.batch_invariant,
            "draft_trees (a tree of draft tokens)": self.draft_trees,
            "two_phase, whose first phase is of all sequences": self.two_phase and self.overlap == "nano",
            f"layer_window = {self.layer_window} (streamed weights)": self.layer_window > 0,
            f"stages = {self.stages} (a mesh with stage)": self.stages > 1,
            f"pools = {self.pools!r}": self.pools is not None and not self.offloads_attention,
        }
        for name in (name for name, is_so in wrong.items() if is_so and self.overlap != "none"):
            raise ConfigError(f"engine: overlap = {self.overlap!r} does not go with {name}; leave one of them out.")

    def _check_mla(self) -> None:
        """Checks what goes with latents in slices."""
        legal = ("exact", "tpla", "tpla:hadamard", "tpla:pca", "tpla:none")
        if self.mla not in legal:
            raise ConfigError(f"engine: mla = {self.mla!r}; legal: {', '.join(legal)}.")
        wrong = {
            f"adapter_slots = {self.adapter_slots}, adapters of weights that are not rotated": self.adapter_slots > 0,
            f"retention = {self.retention!r}": self.retention is not None,
            f"kv_dtype = {self.kv_dtype!r}, which encodes whole pages": bool(self.residual_window),
            f"kv_dtype = {self.kv_dtype!r}, which reorders channels": self.orders_channels,
            f"head_clusters = {self.head_clusters} (chai)": self.head_clusters > 1,
            "chunk_cache": self.chunk_cache,
            "two_phase": self.two_phase,
            f"overlap = {self.overlap!r}": self.overlap != "none",
            "batch_invariant": self.batch_invariant,
            f"speculate = {self.speculate!r} and verify_tokens = {self.verify_tokens}": self.verify_tokens > 0
            or self.speculate is not None,
            f"layer_window = {self.layer_window} (streamed weights)": self.layer_window > 0,
            f"stages = {self.stages} (a mesh with stage)": self.stages > 1,
            f"pools = {self.pools!r}": self.pools is not None,
        }
        for name in (name for name, is_so in wrong.items() if is_so and self.mla != "exact"):
            raise ConfigError(f"engine: mla = {self.mla!r} does not go with {name}; leave one of them out.")

    def _check_span(self) -> None:
        """Checks what goes with pages that are spread over devices."""
        wrong = {
            f"retention = {self.retention!r}": self.retention is not None,
            f"kv_dtype = {self.kv_dtype!r}, which encodes whole pages": bool(self.residual_window),
            f"mla = {self.mla!r}": self.mla != "exact",
            "chunk_cache": self.chunk_cache,
            "two_phase": self.two_phase,
            f"overlap = {self.overlap!r}": self.overlap != "none",
            "batch_invariant": self.batch_invariant,
            "draft_trees (a tree of draft tokens)": self.draft_trees or (self.speculate or "").startswith("tree"),
            f"layer_window = {self.layer_window} (streamed weights)": self.layer_window > 0,
            f"stages = {self.stages} (a mesh with stage)": self.stages > 1,
            f"pools = {self.pools!r}": self.pools is not None,
            "kv_host_gib and kv_disk, tiers of pages": self.has_tiers,
        }
        for name in (name for name, is_so in wrong.items() if is_so and self.kv_span):
            raise ConfigError(f"engine: kv_span does not go with {name}; leave one of them out.")

    def in_halves(self, requests: int, *, decode: bool) -> bool:
        """Whether a step goes through the layers in two halves.

        Args:
            requests: sequences that its program is compiled for.
            decode: every sequence has one row.
        """
        return self.overlap == "nano" and requests > 1 if decode else self.overlap != "none"

    def _check_adapters(self) -> None:
        if self.adapter_slots < 0:
            raise ConfigError(f"engine: adapter_slots = {self.adapter_slots}; give 0 (no adapters) or more.")
        if not 1 <= self.adapter_rank <= 256:
            raise ConfigError(f"engine: adapter_rank = {self.adapter_rank}; give the largest rank served, 1 to 256.")
        if not 1 <= self.adapter_page_ranks <= 256:
            raise ConfigError(f"engine: adapter_page_ranks = {self.adapter_page_ranks}; give 1 to 256, such as 16.")
        if self.adapter_pages is not None and (not self.adapter_slots or self.adapter_pages < self.adapter_columns):
            raise ConfigError(
                f"engine: adapter_pages = {self.adapter_pages} with adapter_slots = {self.adapter_slots}; give slots, "
                f"and at least the {self.adapter_columns} pages that one adapter of rank {self.adapter_rank} takes."
            )

    @property
    def adapter_columns(self) -> int:
        """Pages that an adapter of the largest rank takes."""
        return -(-self.adapter_rank // self.adapter_page_ranks)

    @property
    def pages_of_adapters(self) -> int:
        """Pages of the pool of adapters."""
        return self.adapter_slots * self.adapter_columns if self.adapter_pages is None else self.adapter_pages

    def _check_invariant(self) -> None:
        for name in ("retention", "speculate", "verify_tokens"):
            if getattr(self, name):
                raise ConfigError(
                    f"engine: batch_invariant does not go with {name} = {getattr(self, name)!r}: a request's steps "
                    "would differ with its company. Leave one of them out."
                )
        if self.phase_split != "whole":
            raise ConfigError(
                f"engine: batch_invariant does not go with phase_split = {self.phase_split!r}: all steps have one "
                "size. Leave one of them out."
            )
        if self.preemption != "swap":
            raise ConfigError(
                "engine: batch_invariant needs preemption = 'swap': recomputed values differ in their bits."
            )
        if self.samplers != ("full",):
            raise ConfigError("engine: batch_invariant needs samplers = ('full',): one program for all requests.")
        if self.buckets not in (None, (self.max_batched_tokens,)) or self.decode_steps != 1:
            raise ConfigError(
                "engine: batch_invariant needs decode_steps = 1 and no buckets: one program for all steps."
            )
        if self.prefill_chunk is not None and self.prefill_chunk < 1:
            raise ConfigError(
                f"engine: batch_invariant with max_sequences = {self.max_sequences} needs max_batched_tokens of "
                f"{self.max_sequences} plus a page ({self.page_size or 1} tokens), not {self.max_batched_tokens}."
            )

    @property
    def prefill_chunk(self) -> int | None:
        """Chunk length of chunked prefill in batch-invariant mode: prompts are split at its multiples; else None."""
        if not self.batch_invariant:
            return None
        size = self.page_size or 1
        return (self.max_batched_tokens - self.max_sequences) // size * size

    @property
    def prompt_buckets(self) -> tuple[int, ...]:
        """Token counts that steps with prefill are compiled for and padded to."""
        if self.batch_invariant:
            return (self.max_batched_tokens,)
        if self.buckets is not None:
            return self.buckets
        sizes = {self.max_batched_tokens}
        while min(sizes) > 64:
            sizes.add(max(16, -(-min(sizes) // 4)))
        decode = () if self._decodes_in_loops else self._sequence_counts
        return tuple(sorted({*sizes, *self.verify_buckets, *decode}))

    @property
    def verify_buckets(self) -> tuple[int, ...]:
        """Token counts of steps in which a bucket of sequences verify their proposed tokens."""
        if not self.verify_tokens:
            return ()
        sizes = (count * (1 + self.verify_tokens) for count in self._sequence_counts)
        return tuple(size for size in sizes if size < self.max_batched_tokens)

    @property
    def decode_buckets(self) -> tuple[int, ...]:
        """Sequence counts that decode-only steps are compiled for and padded to."""
        if self.batch_invariant or not self._decodes_in_loops:
            return ()
        return self._sequence_counts

    @property
    def _decodes_in_loops(self) -> bool:
        """Whether there are programs that decode several tokens, for which they need all layers."""
        return not (self.layer_window or self.stages > 1 or self.offloads_attention)

    @property
    def offloads_attention(self) -> bool:
        """Whether pages and attention have devices of their own, see ``jaxllm.infer.attention_pool``."""
        return self.pools is not None and are_attention_pools(self.pools)

    @property
    def _sequence_counts(self) -> tuple[int, ...]:
        sizes = [1]
        while sizes[-1] < self.max_sequences:
            sizes.append(min(2 * sizes[-1], self.max_sequences))
        return tuple(sizes)

    def program_rows(self, requests: int, tokens: int, *, decode: bool) -> tuple[int, bool]:
        """(rows, decode-only) of the smallest program that a step fits into.

        Args:
            requests: sequences in the step.
            tokens: rows of the step's flat batch.
            decode: every sequence has one row.
        """
        decode = decode and bool(self.decode_buckets)
        sizes, least = (self.decode_buckets, requests) if decode else (self.prompt_buckets, tokens)
        return next(size for size in sizes if size >= least), decode


def serving_config(
    *, max_sequences: int, max_batched_tokens: int, max_len: int | None, kv_dtype: KvDtype, **fields: Any
) -> EngineConfig:
    """Configuration of ``jaxllm serve``, which ``jaxllm compile --serve`` compiles the programs of."""
    return EngineConfig(
        max_sequences=max_sequences,
        max_batched_tokens=max_batched_tokens,
        max_len=max_len,
        top_logprobs=20,
        kv_dtype=kv_dtype,
        **fields,
    )


def _quantised_formats() -> tuple[str, ...]:
    # Imported here: configurations are read without importing JAX.
    from pallas_kernels.paged_attention.kv_formats import quantised_formats

    return quantised_formats()
