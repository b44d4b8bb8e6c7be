"""Endless text through a cache of fixed size, with and without the first tokens kept (StreamingLLM).

Xiao et al. 2023, arXiv:2309.17453: positions are those within the cache, so a token moves as others leave it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nexus_ablate.attention import Attend, AttentionCore, fitted, substituted
from nexus_ablate.axes.position import Position
from nexus_ablate.data import eval_windows
from nexus_ablate.measure.evaluation.subject import EVALUATION, Evaluation, NotDefined, Subject
from nexus_ablate.model import GPT

_CHUNK_NUMBERS = 2**24
"""Largest tensor of gathered keys or position biases, in numbers."""


@EVALUATION.register("streaming")
class Streaming(Evaluation):
    """Loss in nats per token of reading on when the cache is full, with the first `kept` tokens kept and without.

    The cache holds as many tokens as the training context; a learned sink token or key of the architecture is always
    kept besides. `difference` is without minus with: what the model owes to its first tokens. `loss_before` is that of
    the tokens before the cache was full.
    """

    def __init__(self, *, kept: int, texts: int, length: int) -> None:
        self.kept, self.texts, self.length = kept, texts, length

    def __call__(self, subject: Subject) -> dict[str, Any]:
        """
        Raises:
            NotDefined: Positions are put into the embedding, so that a cached token cannot move; or the text is short.
        """
        model, window = subject.model, subject.context
        if type(model.position).embed is not Position.embed:
            raise NotDefined("positions are put into the embedding: a token in the cache cannot be given another one")
        subject.require_free_text()
        length = self.length * window
        if len(subject.val) < length + 1:
            raise NotDefined(f"the validation text holds {len(subject.val)} tokens, and {length + 1} are needed")
        if window <= self.kept:
            raise NotDefined(f"a cache of {window} tokens has no room besides the {self.kept} that are kept")
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
    """While it is entered, a forward pass reads every token as token-by-token reading with the cache would.

    Keys and values of a token do not depend on what is evicted later, so all queries are done at once: each against
    its own cache, gathered, with the positions put in anew.
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
    """No positions yet: queries and keys reach the cores as they are projected."""

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
            score_BH1S = score_BH1S + fitted(bias, core.prefix.columns, core.prefix.sink)[:, :, -1:]
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
            q_nHTd = q_BHTd.new_zeros(B * len(i_n), H, cached, d)  # the position schemes place queries from 0 on
            q_nHTd[:, :, -1] = q_BHTd[:, :, i_n].transpose(1, 2).flatten(0, 1)
            out_nHd = newest(core, q_nHTd, k_nGSd, v_nGSd)[:, :, 0]
            out.append(out_nHd.view(B, len(i_n), H, d).transpose(1, 2))
        return torch.cat(out, 2)

    return attend
