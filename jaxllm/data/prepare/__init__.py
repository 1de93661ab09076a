"""Corpus preparation: text of any size to clean, deduplicated token shards with a manifest, resumable after a kill.

    from jaxllm.data.prepare.preparation import prepare_corpus

    prepare_corpus(read_corpus_config(Path("corpus.toml")), workers=8)

One file each: the settings (`corpus_config`), input files and rows (`object_cache`, `corpus_rows`), rules
(`document_rules`), duplicates (`near_duplicates`), the stages of tasks (`stages`), who runs them (`executors`), the
manifest that training opens (`corpus_manifest`) and the report (`corpus_report`).
"""
