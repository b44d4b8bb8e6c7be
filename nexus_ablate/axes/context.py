"""What the layers of one forward pass share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from nexus_ablate.axes.position import Position


@dataclass
class Context:
    """One forward pass. Every block passes it on to its branches.

    Attributes:
        tokens_BT: The tokens of the text.
        positions: The position scheme of each layer.
        sink: Tokens that precede the text inside the blocks: 1 with a sink token, else 0.
        store: Tensors that a layer leaves for later layers, by a name that its option chooses.
        losses: What is added to the training loss, by name, summed over the layers, in nats per token.
        figures: Numbers about this pass by name, one for each layer that reports them.
        sums: What the `after_step` of modules gets, by name.
    """

    tokens_BT: Tensor
    positions: Sequence[Position]
    sink: int = 0
    store: dict[str, Tensor] = field(default_factory=dict)
    losses: dict[str, Tensor] = field(default_factory=dict)
    figures: dict[str, list[Tensor]] = field(default_factory=dict)
    sums: dict[str, Tensor] = field(default_factory=dict)

    def add_loss(self, name: str, loss: Tensor) -> None:
        """Train on this scalar too. Its factor is already in it. It is logged as `option/NAME`."""
        self.losses[name] = self.losses[name] + loss if name in self.losses else loss

    def add_figure(self, name: str, figure: Tensor) -> None:
        """Log this scalar as `option/NAME`: its mean over layers and steps."""
        self.figures.setdefault(name, []).append(figure.detach())

    def add_sum(self, name: str, tensor: Tensor) -> None:
        """Give this tensor to the `after_step` of modules, summed over all that has this name in the step's passes."""
        self.sums[name] = self.sums[name] + tensor.detach() if name in self.sums else tensor.detach()

    def for_one_block(self) -> Context:
        """A context with the same store, in which a block adds without changing this one."""
        return Context(
            self.tokens_BT, self.positions, self.sink, dict(self.store)
        )  # PyTorch 2.11 can't trace `replace`

    def take(
        self,
        store: dict[str, Tensor],
        losses: dict[str, Tensor],
        figures: dict[str, list[Tensor]],
        sums: dict[str, Tensor],
    ) -> None:
        """Add what a block added to the context of `for_one_block`."""
        self.store |= store
        for name, loss in losses.items():
            self.add_loss(name, loss)
        for name, numbers in figures.items():
            self.figures.setdefault(name, []).extend(numbers)
        for name, tensor in sums.items():
            self.add_sum(name, tensor)

    def contributed(self) -> dict[str, Tensor]:
        """Every loss, and the mean of every figure over the layers, detached, by the name it is logged under."""
        means = {name: sum(numbers) / len(numbers) for name, numbers in self.figures.items()}
        return {f"option/{name}": number.detach() for name, number in (means | self.losses).items()}  # type: ignore[reportAttributeAccessIssue]
