"""`nexus-ablate sample RUN --prompt TEXT`: text that a trained model writes."""

from __future__ import annotations

import shlex

from nexus_ablate.cli.flags import PROMPT, Flags
from nexus_ablate.cli.verb import Verb
from nexus_ablate.errors import OK, ConfigError, escaped

VERB = Verb(
    "sample",
    "text from a trained or an imported model",
    "RUN",
    (
        ('sample last --prompt "def main("', "the run that changed last continues a prompt"),
        ("sample 1a2b3c4d", "a run by its id, from the start of a text"),
    ),
    (PROMPT,),
    "Reads the run's newest checkpoint. The model sees as many tokens as in training (model.context).",
    "one run",
    1,
    kind="results",
)


TOKENS = 200
"""That are written."""


def run(words: list[str], flags: Flags) -> int:
    """Print the prompt and the text that follows it."""
    from nexus_ablate.runs.lookup import run_at

    path = run_at(words[0], "sample")

    import torch

    from nexus_ablate.runs import read_run
    from nexus_ablate.training.evaluation import restore

    record = read_run(path)
    if record.state == "diverged":
        raise ConfigError("this run diverged, so it left no model to sample from", str(path), "nexus-ablate status")
    if "eval_hash" not in (record.summary or {}):
        problem = "this run has not ended, so it has no record of the text that it was validated on"
        raise ConfigError(problem, f"{path}: {record.state}", "run its command again, which resumes it")
    config, data, model = restore(record)
    prompt = flags.get("prompt", "")
    tokens = torch.tensor([*(data.tokenizer.encode(prompt) if prompt else data.tokenizer.separator)], dtype=torch.long)
    if not len(tokens):
        problem = "no token of this run's text begins a document, so sample needs a prompt"
        example = shlex.quote(data.tokenizer.decode(data.val["val"][:8]))
        raise ConfigError(problem, "no --prompt", f"nexus-ablate sample {shlex.quote(words[0])} --prompt {example}")
    generator = torch.Generator().manual_seed(1)
    start = len(tokens)
    with torch.no_grad():
        for _ in range(TOKENS):
            logits_V = model(tokens[None, -config.model.context :])[0, -1]
            logits_V = logits_V[: data.vocab_size].float()  # the embedding can have further rows
            token = torch.multinomial(torch.softmax(logits_V, 0), 1, generator=generator)
            tokens = torch.cat((tokens, token))
    text = data.tokenizer.decode(tokens[start:].numpy())
    print(prompt + escaped(text, kept="\n\t"))
    return OK
