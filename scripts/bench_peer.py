"""Our training step beside a peer's at the same shape, in turn in one process:

    python scripts/bench_peer.py plain [KEY=VALUE ...]                       the Llama-style model of this file
    python scripts/bench_peer.py path/to/nanoGPT/model.py [KEY=VALUE ...]    its model, optimizer and loop body
    python scripts/bench_peer.py x-transformers [KEY=VALUE ...]              pip install x-transformers
    python scripts/bench_peer.py table [PEER ...]                            the table of docs/performance.md

Separate processes and page faults mislead by ten per cent: both live in one process, which keeps its memory, and take
blocks of steps in turn. Ours is the step of a real run, with its default logging, gradient norms and probe. The peers'
code is not part of this repository, except the plain model. With one thread the clock is the process's: what others do
meanwhile stands still.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

PLAIN_RECIPE = ["data=stdlib", "data.tokenizer=bytes", "train.device=cpu"]
RECIPE = ["preset=nanogpt_shakespeare", *PLAIN_RECIPE]

BLOCK_STEPS = 50
"""Steps of a block, as many as between two of our probes."""

Peer = tuple[Callable[..., Any], Any, Any]
"""Loss of inputs and targets, model, optimizer."""


def nanogpt(path: str, config: Any, vocab_size: int, optimizer_device: str) -> Peer:
    """The peer that nanoGPT's model.py makes; it takes the fused optimizer where `optimizer_device` is a GPU."""
    import torch

    spec = importlib.util.spec_from_file_location("peer_model", path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules["peer_model"] = module
    spec.loader.exec_module(module)
    shape = config.model
    sizes = shape.context, vocab_size, shape.n_layers, shape.n_heads, shape.d_model
    with torch.device(config.train.device):
        model = module.GPT(module.GPTConfig(*sizes, dropout=0.0, bias=config.bias))
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), optimizer_device)
    return lambda x, y: model(x, y)[1], model, optimizer


def x_transformers(config: Any, vocab_size: int) -> Peer:
    """x-transformers as its README sets it up, with the default AdamW."""
    import torch
    from torch.nn import functional as F
    from x_transformers import Decoder, TransformerWrapper  # type: ignore[reportMissingImports]

    shape = config.model
    layers = Decoder(
        dim=shape.d_model, depth=shape.n_layers, heads=shape.n_heads, attn_dim_head=shape.d_model // shape.n_heads
    )
    model = TransformerWrapper(num_tokens=vocab_size, max_seq_len=shape.context, attn_layers=layers)
    model = model.to(config.train.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return lambda x, y: F.cross_entropy(model(x).transpose(1, 2), y), model, optimizer


def plain(config: Any, vocab_size: int) -> Peer:
    """A Llama-style decoder as a short script writes it: the architecture of the default arm, with fused AdamW."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    shape, d_ff = config.model, config.resolved.d_ff
    width, heads = shape.d_model, shape.n_heads
    head_dim = width // heads

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

        def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            q, k, v = (
                linear(x).view(*x.shape[:2], heads, head_dim).transpose(1, 2)
                for linear in (self.query, self.key, self.value)
            )
            q, k = (z * cos + torch.cat((-z[..., head_dim // 2 :], z[..., : head_dim // 2]), -1) * sin for z in (q, k))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.out(y.transpose(1, 2).flatten(2))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention_norm, self.ffn_norm = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
            self.attention = Attention()
            self.gate, self.up = nn.Linear(width, d_ff, bias=False), nn.Linear(width, d_ff, bias=False)
            self.down = nn.Linear(d_ff, width, bias=False)

        def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            x = x + self.attention(self.attention_norm(x), cos, sin)
            z = self.ffn_norm(x)
            return x + self.down(F.silu(self.gate(z)) * self.up(z))

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(vocab_size, width)
            self.blocks = nn.ModuleList(Block() for _ in range(shape.n_layers))
            self.norm = nn.RMSNorm(width, eps=1e-6)
            rates = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
            angles = torch.outer(torch.arange(shape.context), rates).repeat(1, 2)
            self.register_buffer("cos", angles.cos())
            self.register_buffer("sin", angles.sin())

        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x, self.cos, self.sin)
            logits = F.linear(self.norm(x), self.embedding.weight)
            return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    model = Decoder()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.02)
    model = model.to(config.train.device)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return model, model, torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)


def peer_step(peer: Peer, config: Any, batches: Iterator[Any]) -> Callable[[], None]:
    """The loop body of nanoGPT's train.py, on pairs of inputs and targets."""
    import torch

    loss_of, model, optimizer = peer
    device = config.train.device

    def step() -> None:
        x, y = next(batches)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=config.train.precision == "bf16"):
            loss = loss_of(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def drawn(config: Any, train: Any) -> Iterator[Any]:
    """Batches as nanoGPT's train.py draws them."""
    import numpy as np
    import torch

    tokens, context, device = np.asarray(train), config.model.context, config.train.device

    def rows(starts: Any, shift: int) -> Any:
        parts = torch.stack(
            [torch.from_numpy(tokens[i + shift : i + shift + context].astype(np.int64)) for i in starts]
        )
        return parts.pin_memory().to(device, non_blocking=True) if device == "cuda" else parts

    while True:
        starts = torch.randint(len(tokens) - context, (config.train.batch_size,))
        yield rows(starts, 0), rows(starts, 1)


def made(peer: str, config: Any, vocab_size: int, optimizer_device: str) -> Peer:
    """The peer that was asked for."""
    if peer == "plain":
        return plain(config, vocab_size)
    if peer == "x-transformers":
        return x_transformers(config, vocab_size)
    return nanogpt(peer, config, vocab_size, optimizer_device)


def block(step: Callable[[], object]) -> Callable[[], None]:
    """BLOCK_STEPS steps, of which ours record one probe."""

    def steps() -> None:
        for _ in range(BLOCK_STEPS):
            step()

    return steps


def compare(
    peer: str, overrides: list[str], threads: int, seconds: float, compiled: Sequence[bool], vocab: Any
) -> None:
    """Print a row for ours and the peer, eager or compiled or both: milliseconds per step, ratios, their quartiles.

    Args:
        compiled: Whether each pair is compiled; all candidates take turns.
        vocab: Tokens of both models; None: the data's.
    """
    import torch
    from bench_step import endless, running

    from nexus_ablate.bench.timing import clock_of, in_turn, ratios, spread
    from nexus_ablate.config.compose import compose
    from nexus_ablate.study.arm_overrides import merged

    torch.set_num_threads(threads)
    works: dict[str, Callable[[], None]] = {}
    with ExitStack() as stack:
        for is_compiled in compiled:
            form = "compiled" if is_compiled else "eager"
            how = [f"train.compile={'on' if is_compiled else 'off'}", f"probe.every={BLOCK_STEPS}"]
            base = PLAIN_RECIPE if peer == "plain" else RECIPE
            config = compose(endless(merged([*base, *how], overrides)))
            trainer = stack.enter_context(running(config, vocab))
            vocab_size = trainer.model.geometry.vocab_size
            loss_of, model, optimizer = made(peer, config, vocab_size, config.train.device)
            if is_compiled:
                loss_of = torch.compile(loss_of)
            batches = drawn(config, trainer.data.train)
            works[f"ours {form}"] = block(trainer.step_and_record)
            works[f"peer {form}"] = block(peer_step((loss_of, model, optimizer), config, batches))
            counts = [sum(p.numel() for p in m.parameters()) for m in (trainer.model, model)]
        for work in works.values():
            work()
        taken = in_turn(works, seconds, clock_of(trainer.device))
    name = f"{' '.join(overrides)} beside {peer.rpartition('/')[2]}, {threads} thread(s)"
    print(f"{name}: {counts[0]:,} and {counts[1]:,} parameters, {len(taken['ours ' + form])} blocks")
    for work, times in taken.items():
        print(f"  {work:14} {1000 * spread(times).median / BLOCK_STEPS:7.2f} ms")
    for form in [form for form in ("eager", "compiled") if f"ours {form}" in taken]:
        ratio = ratios(taken[f"ours {form}"], taken[f"peer {form}"])
        print(f"  ours / peer, {form}: {ratio.text(3)}", flush=True)
    if len(compiled) > 1:
        for who in ("ours", "peer"):
            ratio = ratios(taken[f"{who} compiled"], taken[f"{who} eager"])
            print(f"  compiled / eager, {who}: {ratio.text(3)}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", help="plain, path of nanoGPT's model.py, x-transformers, or table")
    parser.add_argument("overrides", nargs="*", help="of ours, such as norm=rms or probe=off; of a table, more peers")
    parser.add_argument("--threads", type=int, action="append", help="repeat it for several; 1 and 2 without it")
    parser.add_argument("--seconds", type=float, default=60, help="measured per row, at least five blocks")
    parser.add_argument("--compiled", choices=("off", "on", "both"), default="off")
    parser.add_argument("--vocabulary", type=int, help="tokens of both models; at least the data's")
    arguments = parser.parse_intermixed_args()

    from nexus_ablate.training.device import share_cores_politely
    from nexus_ablate.training.memory import keep_freed_memory

    share_cores_politely()
    keep_freed_memory()
    compiled = {"off": [False], "on": [True], "both": [False, True]}[arguments.compiled]
    for threads in arguments.threads or (1, 2):
        measured = partial(compare, threads=threads, seconds=arguments.seconds)
        if arguments.peer != "table":
            measured(arguments.peer, arguments.overrides, compiled=compiled, vocab=arguments.vocabulary)
            continue
        for size in ("femto", "pico", "nano"):
            measured("plain", [f"model={size}"], compiled=[False, True], vocab=None)
        for peer in arguments.overrides:
            measured(peer, [], compiled=[False], vocab=None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
