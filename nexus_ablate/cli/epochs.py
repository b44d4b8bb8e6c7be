"""`epochs=3`: a run's budget is in steps, and how many an epoch has depends on the text."""

from __future__ import annotations

import re
import shlex

from nexus_ablate.errors import ConfigError

_KEY = re.compile(r"(--)?(train\.)?(num_?)?(train_?)?epochs")


def refuse_epochs(arguments: list[str]) -> None:
    """Refuse a budget in epochs, typed for one run.

    Raises:
        ConfigError: A word is `epochs=3` or another spelling; `try:` has the steps that three epochs of the text are,
            or, where its tokens have not been counted on this machine, the command that counts them.
    """
    place = next((i for i, word in enumerate(arguments) if _KEY.fullmatch(word.partition("=")[0])), None)
    if place is None:
        return
    length = 1 if "=" in arguments[place] else 2
    typed = arguments[place : place + length]
    rest = arguments[:place] + arguments[place + length :]
    overrides = [word for word in rest if "=" in word and not word.startswith("-")]
    overrides = [word for word in overrides if "," not in word or "[" in word]  # without what a multirun sweeps
    problem = (
        "a run's budget is in steps; an epoch has the text's training tokens / "
        "(train.batch_size x train.grad_accum x model.context) of them"
    )

    from nexus_ablate.config.compose import compose
    from nexus_ablate.launch.cost import text_tokens

    config = compose(overrides)
    tokens = text_tokens(config)
    if tokens is None:
        data = [text for text in overrides if text.startswith("data")]
        raise ConfigError(
            f"{problem}; a run counts its text's tokens once, and this text's are not counted yet",
            " ".join(typed),
            shlex.join(["nexus-ablate", *data, "train.steps=1"]),
        )
    number = typed[-1].rpartition("=")[2]
    epochs = float(number) if re.fullmatch(r"\d{1,6}(\.\d{1,6})?", number) else 1.0
    steps = max(1, round(epochs * tokens / config.resolved.tokens_per_step))
    raise ConfigError(problem, " ".join(typed), f"train.steps={steps}")
