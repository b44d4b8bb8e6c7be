"""The core of causal self-attention: the same order of steps for all options.

Apply positions, score, scale, add the position bias, cap, mask, normalize, drop out, mix values. No option is named.

Shape letters: B batch, T queries, S keys, H query heads, G key/value heads, d head width. Each key/value head serves
H / G query heads. The keys of the `Prefix` come before the keys of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nexus_ablate.axes.attention import ATTENTION
from nexus_ablate.axes.modules import Geometry
from nexus_ablate.axes.normalizer import NORMALIZER
from nexus_ablate.axes.position import Position, square
from nexus_ablate.config.run_config import RunConfig
from nexus_ablate.kernels.softmax_attention import flex_attention, softmax_attention, spread

SHORTEST_FLEX = 128
"""Fewest queries for which FlexAttention has a block to skip."""


@dataclass(frozen=True)
class Prefix:
    """The keys before the text. Every query sees them, even outside its window, and they have no position.

    Each count is 0 or 1. The keys come in this order:

    Attributes:
        own: The normalizer's own key: a score without a vector. The attention map has no column for it.
        learned: The learned key of `kv_bias`: a column of the attention map without a query.
        sink: The sink token: a column and a query.
    """

    own: int
    learned: int
    sink: int

    @property
    def columns(self) -> int:
        """Columns of the attention map before the first token of the text."""
        return self.learned + self.sink


Attend = Callable[["AttentionCore", Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""A replacement for a core's `forward`: takes the core and the arguments of `forward`, and returns the same result."""


@contextmanager
def substituted(model: nn.Module, attend: Attend) -> Iterator[None]:
    """Inside the `with`, every core of the model computes `attend(core, q, k, v, bias)`. Hooks on cores still run."""
    cores = [module for module in model.modules() if isinstance(module, AttentionCore)]
    try:
        for core in cores:
            core.substitute = attend
        yield
    finally:
        for core in cores:
            core.substitute = None


class AttentionCore(nn.Module):
    """Queries, keys and values to head outputs. The plain path is the reference; the fused path must equal it.

    Args:
        geometry: With the index of its block.
        scale: Replaces the score's published factor unless None.
        more: The parametrization's factor on the scores, if it has one.
    """

    def __init__(self, config: RunConfig, geometry: Geometry, scale: float | None, more: float | None) -> None:
        super().__init__()
        assert geometry.layer is not None
        self.layer = geometry.layer
        self.score = ATTENTION.build(config.attention, geometry)
        self.normalizer = NORMALIZER.build(config.normalizer, geometry)
        published = self.score.scale if scale is None else scale
        self.scale = published if config.attn_scale == "auto" else config.attn_scale
        if more is not None:
            self.scale *= more
        self.softcap = None if config.attn_softcap == "off" else config.attn_softcap
        self.window = config.resolved.windows[self.layer]
        own = self.normalizer.own_key() is not None
        self.prefix = Prefix(int(own), int(config.kv_bias != "off"), int(config.sink_token))
        self.norm_placed: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]] | None = None
        """The norm that follows the positions of queries and keys, if there is one. Attention owns it."""
        self.substitute: Attend | None = None
        self.dropout = config.model.dropout
        self.fused = self.kernel[0] != "plain"
        self.chooses = config.train.attention == "auto"
        self.flexible = self.chooses and self.score.dot and self.normalizer.fused and geometry.head_dim >= 16

    @property
    def kernel(self) -> tuple[str, str]:
        """How attention is computed, and why."""
        reasons = []
        if not self.score.dot:
            reasons.append("the score is not a dot product")
        if self.softcap is not None:
            reasons.append("the soft-cap comes between scores and mask")
        if not self.normalizer.fused:
            reasons.append("the weights are not a softmax")
        if reasons:
            return "plain", "; ".join(reasons)
        masks = ["window"] if self.window else []
        masks += ["learned sink score"] if isinstance(self.normalizer.own_key(), Tensor) else []
        return "fused", "a softmax of dot products" + (f", {' and '.join(masks)} in the mask" if masks else "")

    def gpu_kernel(self, T: int, bias: Tensor | None) -> str:
        """The kernel that computes attention in a compiled training step of T tokens on a CUDA GPU.

        Args:
            bias: As in `forward`.
        """
        if self.flexes(T, bias):
            parts = ["block mask of the window"] if 0 < self.window < T else []
            parts += ["bias by distance"] if bias is not None else []
            parts += ["soft-cap"] if self.softcap is not None else []
            parts += ["own key by log-sum-exp"] if self.normalizer.own_key() is not None else []
            return f"FlexAttention: {', '.join(parts)}; uncompiled as above"
        if not self.fused or (self.normalizer.sharpens and bias is not None):
            return "plain"
        masked = bias is not None or 0 < self.window < T or isinstance(self.normalizer.own_key(), Tensor)
        return f"scaled_dot_product_attention, {'with a full T x T mask' if masked else 'flash or cuDNN'}"

    def forward(self, q_BHTd: Tensor, k_BGSd: Tensor, v_BGSd: Tensor, bias: Tensor | None) -> Tensor:
        """The values of each query, (B, H, T, d).

        Args:
            q_BHTd: Queries of the sink token and the text, with positions applied.
            k_BGSd: Keys (and values) of the learned key, the sink token and the text.
            bias: The position bias of the text, as `place` returns it.
        """
        if self.substitute is not None:
            return self.substitute(self, q_BHTd, k_BGSd, v_BGSd, bias)
        sharpens = self.normalizer.sharpens
        flexes = q_BHTd.is_cuda and torch.compiler.is_compiling() and self.flexes(q_BHTd.shape[2], bias)
        if (flexes or self.fused) and not (sharpens and bias is not None):
            if sharpens:  # neither bias nor cap comes between, so it is a factor on the queries
                seen_T = self.seen(q_BHTd.shape[2], q_BHTd.device).sum(-1)
                q_BHTd = (q_BHTd * self.normalizer.sharpness(seen_T)).to(q_BHTd.dtype)
            return (self.flex if flexes else self._fused)(q_BHTd, k_BGSd, v_BGSd, bias)
        return self.mixed(F.dropout(self.weights(q_BHTd, k_BGSd, bias), self.dropout, self.training), v_BGSd)

    def weights(self, q_BHTd: Tensor, k_BGSd: Tensor, bias: Tensor | None) -> Tensor:
        """The attention map (B, H, T, S) in float32: each query's weights over the keys it may see.

        The weight of the normalizer's own key has no column: it is 1 minus the sum of the row.
        """
        return self.normalized(self.scores(q_BHTd, k_BGSd, bias), self.seen(q_BHTd.shape[2], q_BHTd.device))

    def mixed(self, weight_BHTS: Tensor, v_BGSd: Tensor) -> Tensor:
        """The values of each query, (B, H, T, d)."""
        return weight_BHTS.to(v_BGSd.dtype) @ spread(v_BGSd, weight_BHTS.shape[1])

    def scores(self, q_BHTd: Tensor, k_BGSd: Tensor, bias: Tensor | None) -> Tensor:
        """Scaled scores with the position bias, (B, H, T, S), before cap and mask."""
        score_BHTS = self.score(q_BHTd, spread(k_BGSd, q_BHTd.shape[1])) * self.scale
        return score_BHTS if bias is None else score_BHTS + self.fitted(bias, q_BHTd.shape[2])

    def fitted(self, bias: Tensor, T: int, own: int = 0) -> Tensor:
        """A position bias of the text as (B or 1, H, T, S); 0 for the prefix, which has no positions.

        Args:
            T, own: As for `seen`.
        """
        columns, rows = own + self.prefix.columns, self.prefix.sink
        bias = square(bias, T - rows)
        bias = bias.reshape(-1, *bias.shape[-3:])
        return F.pad(bias, (columns, 0, rows, 0)) if columns else bias

    def normalized(self, score_BHTS: Tensor, seen_TS: Tensor) -> Tensor:
        """The attention map of scores: capped, masked, normalized."""
        if self.softcap is not None:
            score_BHTS = self.softcap * torch.tanh(score_BHTS / self.softcap)
        if self.normalizer.sharpens:
            score_BHTS = score_BHTS * self.normalizer.sharpness(seen_TS.sum(-1))
        return self.normalizer(score_BHTS.masked_fill(~seen_TS, -torch.inf))  # masked before the cap it would be -c

    def _fused(self, q_BHTd: Tensor, k_BGSd: Tensor, v_BGSd: Tensor, bias: Tensor | None) -> Tensor:
        own, own_score = self.prefix.own, self.normalizer.own_key()
        if own:  # a key of zeros scores 0; a learned score is put in its place below
            k_BGSd, v_BGSd = F.pad(k_BGSd, (0, 0, own, 0)), F.pad(v_BGSd, (0, 0, own, 0))
        H, T, S = q_BHTd.shape[1], q_BHTd.shape[2], k_BGSd.shape[2]
        windowed = 0 < self.window < T
        if bias is None and not windowed and not isinstance(own_score, Tensor):
            # Add one query for each key without one: the fastest kernels need the square causal form.
            added = own + self.prefix.learned
            q_BHSd = F.pad(q_BHTd, (0, 0, added, 0)) if added else q_BHTd
            out_BHSd = self._kernel(q_BHSd, k_BGSd, v_BGSd, None)
            return out_BHSd[:, :, added:] if added else out_BHSd
        mask = q_BHTd.new_zeros(1, 1, T, S) if bias is None else self.fitted(bias, T, own)
        if isinstance(own_score, Tensor):
            column = own_score.to(mask.dtype).view(1, H, 1, 1).expand(len(mask), H, T, 1)
            mask = torch.cat((column, mask[..., 1:].expand(-1, H, -1, -1)), -1)
        mask = mask.masked_fill(~self.seen(T, q_BHTd.device, own), -torch.inf).to(q_BHTd.dtype)
        return self._kernel(q_BHTd, k_BGSd, v_BGSd, mask)

    def _kernel(self, q_BHTd: Tensor, k_BGSd: Tensor, v_BGSd: Tensor, mask: Tensor | None) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        return softmax_attention(q_BHTd, k_BGSd, v_BGSd, mask, self.scale, dropout, self.chooses)

    def flexes(self, T: int, bias: Tensor | None) -> bool:
        """Whether FlexAttention replaces a full T x T mask in a compiled step on a GPU.

        A table of biases keeps the mask: its tile takes more shared memory than an H200 has (240 of 227 KiB at a head
        of 64 in bfloat16), and its gradient would be summed by atomic additions (pytorch issue 137452).
        """
        if self.normalizer.sharpens and (bias is not None or self.softcap is not None):
            return False
        linear = bias is not None and bias.ndim == 1
        masked = 0 < self.window < T or self.softcap is not None or isinstance(self.normalizer.own_key(), Tensor)
        dropout = self.dropout and self.training
        return self.flexible and T >= SHORTEST_FLEX and not dropout and (linear or (masked and bias is None))

    def flex(self, q_BHTd: Tensor, k_BGSd: Tensor, v_BGSd: Tensor, bias: Tensor | None) -> Tensor:
        """The plain path's result by FlexAttention. Soft-cap and bias change the scores inside the kernel."""
        learned, sink, columns = self.prefix.learned, self.prefix.sink, self.prefix.columns

        def sees(i: Tensor, j: Tensor) -> Tensor:
            return self.sees(i, j - learned)

        def change(value: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            if bias is not None:
                i, j = i - sink, j - columns
                added = bias[h] * (i - j)
                value = value + (
                    torch.where((i >= 0) & (j >= 0), added, 0.0) if columns else added
                )  # of the text alone
            return value if self.softcap is None else self.softcap * torch.tanh(value / self.softcap)

        return flex_attention(q_BHTd, k_BGSd, v_BGSd, self.scale, sees, change, self.normalizer.own_key())

    def seen(self, T: int, device: torch.device, own: int = 0) -> Tensor:
        """(T, S), true where query i may see key j: i - window < j <= i, or j is in the prefix.

        Args:
            T: Number of queries: those of the text and of the sink token, if there is one.
            own: Columns for the normalizer's own key, 0 or 1.
        """
        keys_S = torch.arange(-own - self.prefix.learned, T, device=device)
        return self.sees(torch.arange(T, device=device)[:, None], keys_S)

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether query i sees key j. Both indices count from the first query: a key without a query is negative."""
        seen = j <= i
        return seen & ((j > i - self.window) | (j < self.prefix.sink)) if self.window else seen

    def place(self, q_BHTd: Tensor, k_BGTd: Tensor, position: Position) -> tuple[Tensor, Tensor, Tensor | None]:
        """Queries and keys with positions applied, and the position bias. Only the text has positions."""
        sink = self.prefix.sink
        text_q, text_k = (q_BHTd[:, :, sink:], k_BGTd[:, :, sink:]) if sink else (q_BHTd, k_BGTd)
        bias = position.query_bias(text_q, self.layer, self.scale)
        if bias is None:
            bias = position.score_bias(text_q.shape[2], self.layer)
        text_q, text_k = position.rotate(text_q, text_k, self.layer)
        if sink:
            text_q = torch.cat((q_BHTd[:, :, :sink], text_q), 2)
            text_k = torch.cat((k_BGTd[:, :, :sink], text_k), 2)
        if self.norm_placed is not None and position.settles:
            q, k, _ = self.norm_placed(text_q.transpose(1, 2), text_k.transpose(1, 2), text_k.transpose(1, 2))
            text_q, text_k = q.transpose(1, 2), k.transpose(1, 2)
        return text_q, text_k, bias
