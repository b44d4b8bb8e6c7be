"""Endless text through a cache of fixed size, with and without the first tokens kept (StreamingLLM).

Xiao et al. 2023, arXiv:2309.17453: positions are those within the cache, so a token moves as others leave it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from nexus_ablate.attention import Attention
from nexus_ablate.axes.position import Position
from nexus_ablate.data import eval_windows
from nexus_ablate.measure.evaluation.subject import NotDefined, Subject

KEPT = 4
TEXTS = 4
LENGTH_FACTOR = 8
_CHUNK_NUMBERS = 2**24
"""Largest tensor of gathered keys or position biases, in numbers."""


def streaming(subject: Subject) -> dict[str, Any]:
    """Loss in nats per token of reading on when the cache is full, with the first KEPT tokens kept and without.

    The cache holds as many tokens as the training context; a learned sink token or key of the architecture is always
    kept besides. `difference` is without minus with: what the model owes to its first tokens. `loss_before` is that of
    the tokens before the cache was full.

    Raises:
        NotDefined: Positions are put into the embedding, so that a cached token cannot move; or there is no long text.
    """
    model, window = subject.model, subject.context
    if type(model.position).embed is not Position.embed:
        raise NotDefined("positions are put into the embedding: a token in the cache cannot be given another one")
    subject.require_free_text()
    length = LENGTH_FACTOR * window
    if len(subject.val) < length + 1:
        raise NotDefined(f"the validation text holds {len(subject.val)} tokens, and {length + 1} are needed")
    if window <= KEPT:
        raise NotDefined(f"a cache of {window} tokens has no room besides the {KEPT} that are kept")
    texts = eval_windows(subject.val, length, TEXTS * length)
    losses = {}
    for kept in (KEPT, 0):
        with streamed(model, window, kept):
            losses[kept] = subject.losses(texts).double()
    kept, dropped = (float(losses[k][:, window:].mean()) for k in (KEPT, 0))
    return {
        "cache_tokens": window,
        "kept_tokens": KEPT,
        "text_tokens": length,
        "loss_before": float(losses[0][:, :window].mean()),
        "loss_kept": kept,
        "loss_dropped": dropped,
        "difference": dropped - kept,
    }


@contextmanager
def streamed(model: nn.Module, window: int, kept: int) -> Iterator[None]:
    """While it is entered, a forward pass reads every token as token-by-token reading with the cache would.

    Keys and values of a token do not depend on what is evicted later, so all queries are done at once: each against
    its own cache, gathered, with the positions put in anew.
    """
    attentions = [block.attn for block in model.blocks]  # type: ignore[union-attr]
    try:
        for attention in attentions:
            attention.core.forward = cached_core(attention, model.position, window, kept)  # type: ignore[arg-type]
            attention.place = lambda q, k, position: (q, k, None)
        yield
    finally:
        for attention in attentions:
            del attention.core.forward, attention.place


def cached_core(attention: Attention, position: Position, window: int, kept: int) -> Callable[..., Tensor]:
    """A core whose queries and keys are not placed yet: query i sees `kept` first tokens and the last window - kept."""
    core, front = attention.core, attention.sink_tokens
    cached = front + window

    def attend(q_BHTd: Tensor, k_BGSd: Tensor, v_BGSd: Tensor, last: bool) -> Tensor:
        T, S = q_BHTd.shape[2], k_BGSd.shape[2]
        extra = S - T
        q_BHTd, text_k, bias = Attention.place(attention, q_BHTd, k_BGSd[:, :, extra:], position)
        k_BGSd = torch.cat((k_BGSd[:, :, :extra].expand(len(text_k), -1, -1, -1), text_k), 2)
        if not last:
            return core.mixed(core.weights(q_BHTd, k_BGSd, bias), v_BGSd)
        score_BH1S = core.scores(q_BHTd[:, :, -1:], k_BGSd, bias)
        seen_S = torch.ones(S, dtype=torch.bool, device=score_BH1S.device)
        if core.window:  # the mask of one query alone cannot tell the learned keys from the first tokens
            seen_S[extra + front : max(extra + front, S - core.window)] = False
        return core.mixed(core.normalized(score_BH1S[..., seen_S]), v_BGSd[:, :, seen_S])

    def forward(q_BHTd: Tensor, k_BGSd: Tensor, v_BGSd: Tensor, bias: None) -> Tensor:
        B, H, T, d = q_BHTd.shape
        extra = k_BGSd.shape[2] - T
        full = min(T, cached)
        first = slice(0, extra + full)
        out = [attend(q_BHTd[:, :, :full], k_BGSd[:, :, first], v_BGSd[:, :, first], last=False)]
        recent = cached - front - kept
        always = torch.arange(extra + front + kept, device=q_BHTd.device)
        n_queries = max(1, _CHUNK_NUMBERS // (B * H * cached * max(cached, d)))
        for i_n in torch.arange(full, T, device=q_BHTd.device).split(n_queries) if full < T else ():
            newest_nR = extra + i_n[:, None] + torch.arange(1 - recent, 1, device=i_n.device)
            index_nS = torch.cat((always.expand(len(i_n), -1), newest_nR), 1)
            k_nGSd, v_nGSd = (x[:, :, index_nS].transpose(1, 2).flatten(0, 1) for x in (k_BGSd, v_BGSd))
            q_nHTd = q_BHTd.new_zeros(B * len(i_n), H, cached, d)  # the position schemes place queries from 0 on
            q_nHTd[:, :, -1] = q_BHTd[:, :, i_n].transpose(1, 2).flatten(0, 1)
            seen_nHd = attend(q_nHTd, k_nGSd, v_nGSd, last=True)[:, :, 0]
            out.append(seen_nHd.view(B, len(i_n), H, d).transpose(1, 2))
        return torch.cat(out, 2)

    return forward
