"""Data: a corpus, its tokens in a cache, and batches that are a pure function of (seed, step)."""

from nexus_ablate.data.backcopy import BackCopyCorpus
from nexus_ablate.data.batches import Batches, chain, eval_places, eval_windows, hash_tokens
from nexus_ablate.data.cache import (
    TokenizedData,
    cached,
    fingerprint_of,
    prepare,
    repeated_text,
    vocabulary_size,
)
from nexus_ablate.data.corpus import DATA, Corpus
from nexus_ablate.data.hub import HubCorpus
from nexus_ablate.data.tasks import CopyCorpus, InductionCorpus, RecallCorpus, TaskCorpus
from nexus_ablate.data.tokenizer import Tokenizer, load_tokenizer, token_kinds

__all__ = [
    "DATA",
    "BackCopyCorpus",
    "Batches",
    "CopyCorpus",
    "Corpus",
    "HubCorpus",
    "InductionCorpus",
    "RecallCorpus",
    "TaskCorpus",
    "TokenizedData",
    "Tokenizer",
    "cached",
    "chain",
    "eval_places",
    "eval_windows",
    "fingerprint_of",
    "hash_tokens",
    "load_tokenizer",
    "prepare",
    "repeated_text",
    "token_kinds",
    "vocabulary_size",
]
