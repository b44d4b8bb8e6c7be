"""Read endless text with a cache of fixed size, with and without keeping the first tokens (StreamingLLM).

Xiao et al. 2023, arXiv:2309.17453: positions count within the cache, so a token's position changes when others leave.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nexus_ablate.attention_core import Attend, AttentionCore, substituted
from nexus_ablate.axes.position import Position
from nexus_ablate.data import eval_windows
from nexus_ablate.measure.evaluation.subject import EVALUATION, Evaluation, NotDefined, Subject
from nexus_ablate.model import GPT

_CHUNK_NUMBERS = 2**24
"""Largest tensor of gathered keys or position biases, in numbers."""


@EVALUATION.register("streaming")
class Streaming(Evaluation):
    """Loss in nats per token after the cache is full, with and without keeping the first `kept` tokens.

    The cache holds as many tokens as the training context, plus the architecture's learned sink token or key, which is
    always kept. `difference` is the loss without minus the loss with the first tokens: the model's dependence on them.
    `loss_before` is the loss before the cache was full.
    """

    def __init__(self, *, kept: int, texts: int, length: int) -> None:
        self.kept, self.texts, self.length = kept, texts, length

    def __call__(self, subject: Subject) -> dict[str, Any]:
        """
        Raises:
            NotDefined: Positions are part of the embedding, so a cached token can't move; or the text is too short.
        """
        subject.require_attention()
        model, window = subject.model, subject.context
        if type(model.position).embed is not Position.embed:
            raise NotDefined("positions are part of the embedding: a token in the cache can't change its position")
        subject.require_free_text()
        length = self.length * window
        subject.require_text(length)
        if window <= self.kept:
            raise NotDefined(f"a cache of {window} tokens is full with the {self.kept} first tokens that are kept")
        texts = eval_windows(subject.val, length, self.texts * length)
        losses = {}
        for kept in (self.kept, 0):
            with streamed(model, window, kept):
                losses[kept] = subject.losses(texts).double()
        kept, dropped = (float(losses[k][:, window:].mean()) for k in (self.kept, 0))
        return {
            "cache_tokens": window,
            "kept_tokens": self.kept,
            "text_tokens": length,
            "loss_before": float(losses[0][:, :window].mean()),
            "loss_kept": kept,
            "loss_dropped": dropped,
            "difference": dropped - kept,
        }


@contextmanager
def streamed(model: GPT, window: int, kept: int) -> Iterator[None]:
    """Inside the `with`, a forward pass equals reading token by token with the cache.

    Keys and values of a token don't depend on later evictions, so all queries run at once: each attends to its own
    cache, which is gathered and gets new positions.
    """
    before = model.position, model.without_position
    positions = [model.position_at(layer) for layer in range(len(model.blocks))]
    model.position = model.without_position = Unplaced()
    try:
        with substituted(model, cached_core(positions, window, kept)):
            yield
    finally:
        model.position, model.without_position = before


class Unplaced(Position):
    """No positions yet: the cores get queries and keys as projected."""

    settles = False


def cached_core(positions: Sequence[Position], window: int, kept: int) -> Attend:
    """A core for queries and keys without positions: each query sees `kept` first tokens and the last window - kept."""

    def filling(core: AttentionCore, q_BHTd: Tensor, k_BGSd: Tensor, v_BGSd: Tensor) -> Tensor:
        """All queries, while the cache still holds every token."""
        q_BHTd, k_BGSd, bias = placed(core, q_BHTd, k_BGSd)
        return core.mixed(core.weights(q_BHTd, k_BGSd, bias), v_BGSd)

    def newest(core: AttentionCore, q_BHTd: Tensor, k_BGSd: Tensor, v_BGSd: Tensor) -> Tensor:
        """The last query of a full cache, (B, H, 1, d)."""
        q_BHTd, k_BGSd, bias = placed(core, q_BHTd, k_BGSd)
        score_BH1S = core.scores(q_BHTd[:, :, -1:], k_BGSd, None)
        if bias is not None:
            score_BH1S = score_BH1S + core.fitted(bias, q_BHTd.shape[2])[:, :, -1:]
        seen_1S = core.seen(q_BHTd.shape[2], q_BHTd.device)[-1:]
        index = seen_1S[0]
        return core.mixed(core.normalized(score_BH1S[..., index], seen_1S[:, index]), v_BGSd[:, :, index])

    def placed(core: AttentionCore, q_BHTd: Tensor, k_BGSd: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        learned = core.prefix.learned
        q_BHTd, k_BGTd, bias = core.place(q_BHTd, k_BGSd[:, :, learned:], positions[core.layer])
        return q_BHTd, torch.cat((k_BGSd[:, :, :learned].expand(len(k_BGTd), -1, -1, -1), k_BGTd), 2), bias

    def attend(core: AttentionCore, q_BHTd: Tensor, k_BGSd: Tensor, v_BGSd: Tensor, bias: Tensor | None) -> Tensor:
        B, H, T, d = q_BHTd.shape
        learned, cached = core.prefix.learned, core.prefix.sink + window
        full = min(T, cached)
        first = slice(0, learned + full)
        out = [filling(core, q_BHTd[:, :, :full], k_BGSd[:, :, first], v_BGSd[:, :, first])]
        always = torch.arange(core.prefix.columns + kept, device=q_BHTd.device)
        n_queries = max(1, _CHUNK_NUMBERS // (B * H * cached * max(cached, d)))
        for i_n in torch.arange(full, T, device=q_BHTd.device).split(n_queries) if full < T else ():
            newest_nR = learned + i_n[:, None] + torch.arange(1 - (window - kept), 1, device=i_n.device)
            index_nS = torch.cat((always.expand(len(i_n), -1), newest_nR), 1)
            k_nGSd, v_nGSd = (x[:, :, index_nS].transpose(1, 2).flatten(0, 1) for x in (k_BGSd, v_BGSd))
            q_nHTd = q_BHTd.new_zeros(B * len(i_n), H, cached, d)  # position schemes count queries from 0
            q_nHTd[:, :, -1] = q_BHTd[:, :, i_n].transpose(1, 2).flatten(0, 1)
            out_nHd = newest(core, q_nHTd, k_nGSd, v_nGSd)[:, :, 0]
            out.append(out_nHd.view(B, len(i_n), H, -1).transpose(1, 2))  # values may be wider than queries
        return torch.cat(out, 2)

    return attend
