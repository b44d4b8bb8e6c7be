"""Proof that a published model is expressed: its logits against those of the `transformers` library.

The structure is proved on a shrunk model of the same configuration, in float64, where any difference shows. The weights
are proved on the checkpoint itself, in float32.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nexus_ablate.config.compose import compose
from nexus_ablate.errors import ConfigError
from nexus_ablate.pretrained.expression import Expression, express
from nexus_ablate.pretrained.library import built, outline
from nexus_ablate.pretrained.shrink import VOCAB, shrunk
from nexus_ablate.pretrained.weights import Files, load

if TYPE_CHECKING:
    from torch import Tensor, nn

    from nexus_ablate.model import GPT

STRUCTURE = 1e-9
"""Largest difference of a logit of the shrunk model, relative to the largest logit."""
MARGIN = 10.0
"""Largest difference of a checkpoint's logit, in differences between two kernels of the library or in roundings."""
SCORES, ROUNDS = 3.0, 4
"""The standard deviation of the shrunk model's attention scores, and how often it is corrected."""
KERNELS = ("eager", "sdpa")
"""The library's kernels. The second is asked where the first differs: Falcon's eager one adds ALiBi twice."""
LONGEST, CHUNK = 1024, 2**26
"""Most tokens of the proof of the weights, and most logits in memory at a time."""
PREFIX = 16
"""Tokens whose residual stream is kept in the proof of the weights, to find where a difference arises."""


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
    proofs: list[Proof] = []
    for kernel in KERNELS:
        with in_double(), torch.no_grad():
            try:
                library = drawn(built(small, kernel, dtype=torch.float64))
            except ConfigError:  # a model without this kernel
                if not proofs:
                    raise
                break
            expression = express(small, library.state_dict())
            model = counterpart(expression, length, changes)
            sharpen(library, expression, model, tokens)
            with outputs(library.get_submodule(expression.source.blocks)) as expected_blocks:
                expected = library(input_ids=tokens, use_cache=False).logits
            with outputs(model.blocks) as blocks:
                logits = model(tokens)
        difference = float((logits - expected).abs().max() / expected.abs().max())
        part = "" if difference <= STRUCTURE else first_part(blocks, expected_blocks, STRUCTURE)
        proofs.append(Proof(difference, STRUCTURE, length, part))
        if not part:
            break
    return min(proofs, key=lambda proof: proof.difference)


def counterpart(expression: Expression, length: int, changes: Sequence[str] = ()) -> GPT:
    """The model of an expression, in evaluation, for sequences of a length."""
    from nexus_ablate.model import GPT

    context = max(length, expression.context)
    config = compose([*expression.overrides, f"model.context={context}", *changes])
    return GPT(config, config.vocab_size).eval()


def drawn(model: nn.Module) -> nn.Module:
    """The model with all parameters drawn: matrices keep lengths, gains and biases are away from their start."""
    import torch

    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.copy_(noise * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else parameter + 0.3 * noise)
    return model


def sharpen(library: nn.Module, expression: Expression, model: GPT, tokens: Tensor) -> None:
    """Scale the library's queries until each layer's scores have the standard deviation `SCORES`; load the result."""
    from nexus_ablate.attention import spread, substituted

    deviations: list[float] = []

    def attend(core: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        deviations.append(float(core.score(q, spread(k, q.shape[1])).std() * core.scale))
        return core.mixed(core.weights(q, k, bias), v)

    weights = library.state_dict()
    for _ in range(ROUNDS):
        model.load_state_dict(expression.state(model))
        deviations.clear()
        with substituted(model, attend):
            model(tokens)
        for layer, deviation in enumerate(deviations):
            names, power = expression.source.scores(layer)
            for name in names:
                weights[name] *= (SCORES / deviation) ** power
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
    ends = [*range(CHUNK // config.vocab_size, length, CHUNK // config.vocab_size), length]
    chunks = [slice(first, end) for first, end in zip([0, *ends], ends, strict=False)]
    own = scale = difference = 0.0
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        saved = {f"{folder}/{chunk.stop}.npy": chunk for chunk in chunks}
        with outputs(library.get_submodule(expression.source.blocks), PREFIX) as expected_blocks:
            for path, chunk in saved.items():
                np.save(path, library_logits(library, tokens, chunk).numpy())
        again = tokens
        try:
            library.set_attn_implementation(KERNELS[1])  # type: ignore[reportCallIssue]
        except ValueError:  # a model with one kernel: a larger batch is rounded otherwise
            again = torch.cat((tokens, tokens.flip(1)))
        for path, chunk in saved.items():
            expected = torch.from_numpy(np.load(path))
            own = max(own, float((library_logits(library, again, chunk)[:1] - expected).abs().max()))
            scale = max(scale, float(expected.abs().max()))
        del library
        model = counterpart(expression, length)
        model.load_state_dict(expression.state(model), assign=True)
        with outputs(model.blocks, PREFIX) as blocks:
            hidden = model.hidden(tokens)
        for path, chunk in saved.items():
            logits = model.logits(hidden[:, chunk], model.head_weight)
            expected = torch.from_numpy(np.load(path))
            difference = max(difference, float((logits - expected).abs().max()))
    rounding = scale * torch.finfo(torch.float32).eps * len(model.blocks) ** 0.5  # one per block, as they add up
    allowed = MARGIN * max(own, rounding)
    part = "" if difference <= allowed else first_part(blocks, expected_blocks, 1e-3)
    return Proof(difference, allowed, length, part)


def library_logits(library: nn.Module, tokens: Tensor, chunk: slice) -> Tensor:
    """The library's logits of a part of the tokens."""
    kept = chunk.stop - chunk.start
    limit = {"logits_to_keep": kept} if "logits_to_keep" in inspect.signature(library.forward).parameters else {}
    return library(input_ids=tokens[:, : chunk.stop], use_cache=False, **limit).logits[:, -kept:]


def memory_of(config: Any) -> int:
    """Bytes that the proof of the weights takes: the model twice in float32, and three chunks of logits."""
    parameters = sum(tensor.numel() for tensor in outline(config).values())
    return 4 * (2 * parameters + 3 * min(CHUNK, config.vocab_size * LONGEST))


def first_part(blocks: list[Tensor], expected: list[Tensor], tolerance: float) -> str:
    """The first part of a model whose output differs."""
    for layer, (output, other) in enumerate(zip(blocks, expected, strict=False)):
        if (output - other).abs().max() > tolerance * other.abs().max():
            return f"block {layer}" if layer else "block 0 or the embedding"
    return "the final norm or the head"


@contextmanager
def outputs(blocks: Any, tokens: int | None = None) -> Iterator[list[Tensor]]:
    """Collects the output of each block, for the first tokens or for all."""
    collected: list[Tensor] = []

    def keep(block: nn.Module, inputs: Any, output: Any) -> None:
        stream = output[0] if isinstance(output, (tuple, list)) else output
        collected.append(stream[:, :tokens].clone())

    handles = [block.register_forward_hook(keep) for block in blocks]
    try:
        yield collected
    finally:
        for handle in handles:
            handle.remove()


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
            named = {name: widened(value) for name, value in (kwargs or {}).items()}
            return function(*map(widened, args), **named)

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Double():
            yield
    finally:
        torch.set_default_dtype(before)
