"""Options that are declared to be one function. Each pair is proved equal in test_equivalences.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Equivalence:
    """Two sets of overrides whose models compute the same from the same seed, and why."""

    first: tuple[str, ...]
    second: tuple[str, ...]
    why: str
    until: str = "always"
    """`always`, or `decay`: equal until weight decay acts on where they differ."""


EQUIVALENT: list[Equivalence] = [
    Equivalence(("norm=rms",), ("norm=t5",), "one function in float32 at equal eps"),
    Equivalence(("norm=rms",), ("norm=rms_zero",), "a gain g is 1 + w; decay pulls g to 0 or w to 0", "decay"),
    Equivalence(("norm=rms_zero",), ("norm=t5",), "both are rms", "decay"),
    Equivalence(("ffn=gelu",), ("ffn=gelu_tanh",), "an approximation: the nonlinearities differ by at most 0.0005"),
    Equivalence(("norm=layer",), ("norm=layer_zero",), "a gain g is 1 + w; decay pulls g to 0 or w to 0", "decay"),
    Equivalence(
        ("position=irope", "nope_every=2"),
        ("position=rope", "nope_every=2"),
        "queries sharpen only in sequences longer than position.floor_scale",
    ),
    Equivalence(("position=irope",), ("position=rope",), "with fewer layers than nope_every all have positions"),
    Equivalence(
        ("placement=deepnorm", "placement.residual_scale=1", "placement.init_gain=1", "init=gpt2"),
        ("placement=post", "init=gpt2"),
        "DeepNorm without its two constants is post-norm",
    ),
    Equivalence(
        ("placement=residual_scale", "placement.branch_scale=1", "init=gpt2"),
        ("placement=pre", "init=gpt2"),
        "a factor of 1",
    ),
    Equivalence(("position.form=real",), ("position.form=complex",), "two ways to compute one rotation"),
]


def declared(first: str, second: str) -> bool:
    """Whether two options alone are a declared pair, in either order."""
    pairs = {frozenset((e.first, e.second)) for e in EQUIVALENT}
    return frozenset(((first,), (second,))) in pairs
