"""Proof that a published model is expressed: its logits against those of the `transformers` library.

The structure is proved on a shrunk model of the same configuration, in float64, where any difference shows. The weights
are proved on the checkpoint itself, in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nexus_ablate.config.compose import compose
from nexus_ablate.errors import ConfigError
from nexus_ablate.pretrained.expression import Expression, express
from nexus_ablate.pretrained.library import Files, built, kernels, load, logits_of
from nexus_ablate.pretrained.shrink import VOCAB, shrunk

if TYPE_CHECKING:
    from torch import Tensor, nn

    from nexus_ablate.model import GPT

STRUCTURE = 1e-9
"""Largest difference of a logit of the shrunk model, relative to the largest logit."""
MARGIN, LARGEST = 10.0, 1e-3
"""Largest difference of a checkpoint's logit, in differences between two kernels of the library or in roundings; and
relative to the largest logit, where the library's own kernels differ by more."""
SCORES = 3.0
"""About the standard deviation of the shrunk model's attention scores."""
LONGEST = 1024
"""Most tokens of the proof of the weights."""
PREFIX = 64
"""Tokens whose residual stream is kept, to find where a difference arises."""


@dataclass(frozen=True)
class Proof:
    """How far a model is from the library's.

    Attributes:
        difference: The largest difference of a logit; of a structure, relative to the largest logit.
        allowed: The largest that is accepted.
        tokens: The length of the sequences.
        part: The first part whose output differs, '' if the model is accepted.
    """

    difference: float
    allowed: float
    tokens: int
    part: str

    def check(self, problem: str) -> Proof:
        """The proof itself.

        Raises:
            ConfigError: The model is not accepted.
        """
        if not self.difference <= self.allowed:
            got = f"logits differ by {self.difference:.1e} ({self.allowed:.1e} are allowed), first in {self.part}"
            raise ConfigError(
                problem, got, "`nexus-ablate list` shows what can be expressed; report it with the config.json"
            )
        return self


def structure(config: Any, changes: Sequence[str] = ()) -> Proof:
    """The difference of a shrunk model of the same configuration, in float64.

    Args:
        config: The library's configuration.
        changes: Overrides to add to those of the expression, for controls.

    Raises:
        ConfigError: The configuration can't be expressed.
    """
    import torch

    small, length = shrunk(config)
    tokens = torch.randint(0, VOCAB, (2, length), generator=torch.Generator().manual_seed(1))
    with in_double(), torch.no_grad():
        library = built(small, dtype=torch.float64)
        expression = express(small, library.state_dict())
        model = counterpart(expression, length, changes)
        draw(library, expression, model)
        expected_blocks = outputs(library.get_submodule(expression.source.blocks))
        expected = logits_of(library, tokens)
        blocks = outputs(model.blocks)
        difference = distance(model(tokens), expected) / float(expected.abs().max())
    part = "" if difference <= STRUCTURE else first_part(blocks, expected_blocks, STRUCTURE)
    return Proof(difference, STRUCTURE, length, part)


def counterpart(expression: Expression, length: int, changes: Sequence[str] = ()) -> GPT:
    """The model of an expression, in evaluation, for sequences of a length."""
    from nexus_ablate.model import GPT

    context = max(length, expression.context)
    config = compose([*expression.overrides, f"model.context={context}", *changes])
    return GPT(config, config.vocab_size).eval()


def draw(library: nn.Module, expression: Expression, model: GPT) -> None:
    """Draw all parameters of the library's model, and give them to the other one.

    Gains and biases are away from their start. Matrices, or gains where queries and keys are normalized, have the size
    that gives attention scores about the standard deviation `SCORES`.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    attention: Any = model.get_submodule("blocks.0.attn")
    size = (SCORES / (attention.core.scale * expression.source.shape.head_dim**0.5)) ** 0.5
    is_normalized = expression.source.has("blocks.{}.attn.qk_norm.query.gain")
    for name, parameter in library.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        d_in = min(parameter.shape[-1], expression.source.config.hidden_size)  # also if stored as (d_in, d_out)
        if parameter.ndim > 1:
            parameter.copy_(noise * d_in**-0.5 * (1.0 if is_normalized else size))
        else:
            parameter += 0.3 * noise + (size - 1.0 if is_normalized and name.endswith("weight") else 0.0)
    model.load_state_dict(expression.state(model))


def weights(config: Any, files: Files) -> Proof:
    """The difference of the model with its published weights, one model in memory at a time.

    Args:
        config: The library's configuration.
        files: As in `weight_files`.

    Raises:
        ConfigError: As in `load`.
    """
    import torch

    library = load(config, files)
    expression = express(config, library.state_dict())
    length = min(expression.context, LONGEST)
    tokens = torch.randint(0, config.vocab_size, (1, length), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected_blocks = outputs(library.get_submodule(expression.source.blocks))
        expected = logits_of(library, tokens)
        with suppress(ValueError):  # a model with one kernel
            library.set_attn_implementation(kernels(config)[1])  # type: ignore[reportCallIssue]
        own = distance(logits_of(library, tokens), expected)
        del library
        model = counterpart(expression, length)
        model.load_state_dict(expression.state(model), assign=True)
        blocks = outputs(model.blocks)
        difference = distance(model(tokens), expected)
    scale = float(expected.abs().max())
    rounding = scale * torch.finfo(torch.float32).eps * len(model.blocks) ** 0.5  # one per block, as they add up
    allowed = min(MARGIN * max(own, rounding), LARGEST * scale)
    part = "" if difference <= allowed else first_part(blocks, expected_blocks, LARGEST)
    return Proof(difference, allowed, length, part)


def distance(actual: Tensor, expected: Tensor) -> float:
    """The largest difference between two tensors."""
    return float((actual - expected).abs().max())


def first_part(blocks: list[Tensor], expected: list[Tensor], tolerance: float) -> str:
    """The first part of a model whose output differs."""
    for layer, (output, other) in enumerate(zip(blocks, expected, strict=False)):
        if distance(output, other) > tolerance * float(other.abs().max()):
            return f"block {layer}" if layer else "block 0 or the embedding"
    return "the final norm or the head"


def outputs(blocks: Any) -> list[Tensor]:
    """A list that collects the output of each block for the first tokens, from now on."""
    collected: list[Tensor] = []

    def keep(block: nn.Module, inputs: Any, output: Any) -> None:
        stream = output[0] if isinstance(output, (tuple, list)) else output
        collected.append(stream[:, :PREFIX].clone())

    for block in blocks:
        block.register_forward_hook(keep)
    return collected


@contextmanager
def in_double() -> Iterator[None]:
    """Inside, tensors are made in float64, and conversions to float32 give float64.

    Both libraries compute norms, softmax and angles in float32 whatever the precision of their model, which would limit
    a comparison to seven digits.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    def widened(value: Any) -> Any:
        return torch.float64 if value is torch.float32 else value

    class Double(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            function = torch.Tensor.double if function is torch.Tensor.float else function
            return function(*map(widened, args), **{name: widened(value) for name, value in (kwargs or {}).items()})

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Double():
            yield
    finally:
        torch.set_default_dtype(before)
