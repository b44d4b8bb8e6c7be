"""The GPT: embedding, blocks, head. No option is named here; every choice is passed in as a part.

Shape letters: B batch, T time, D d_model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nexus_ablate import mixers as mixers  # registers its options
from nexus_ablate.axes.context import Context
from nexus_ablate.axes.conv import CONV
from nexus_ablate.axes.ffn import FFN, FFNParts
from nexus_ablate.axes.head import HEAD
from nexus_ablate.axes.init import BRANCH_OUTPUTS, INIT, initialise
from nexus_ablate.axes.mixer import MixerParts, mixer_at
from nexus_ablate.axes.modules import Geometry, Linear, Site, Table, parameter_roles
from nexus_ablate.axes.norm import NORM
from nexus_ablate.axes.param import PARAM
from nexus_ablate.axes.placement import PLACEMENT, Parts
from nexus_ablate.axes.position import POSITION, Position
from nexus_ablate.config.roles import SMALL_MAP
from nexus_ablate.config.run_config import Option, RunConfig
from nexus_ablate.kernels.linear import chosen_product, products

AROUND = ("embed", "final")
"""Sites of the norms before the first block and after the last."""


class GPT(nn.Module):
    """A decoder-only transformer: `logits_BTV = model(tokens_BT)`."""

    def __init__(self, config: RunConfig, vocab_size: int) -> None:
        super().__init__()
        self.z_hashes: dict[str, str] = {}
        model, resolved = config.model, config.resolved
        vocab_size = vocab_size if config.vocab_size == "auto" else config.vocab_size
        geometry = Geometry(
            n_layers=model.n_layers,
            d_model=model.d_model,
            n_heads=model.n_heads,
            n_kv_heads=resolved.n_kv_heads,
            head_dim=resolved.head_dim,
            d_ff=resolved.d_ff,
            context=model.context,
            vocab_size=vocab_size,
            nope_layers=resolved.nope_layers,
        )

        def norm(site: str, width: int = model.d_model, layer: int | None = None) -> nn.Module:
            option, sites = config.norm, config.norm_gain_sites
            if "gain_init" in option.keys and not (site not in AROUND if sites == "blocks" else site in sites):
                option = Option(option.name, option.keys | {"gain_init": 1.0})
            return NORM.build(option, width, resolved.norm_bias, Site.at(site, layer))

        def mixer(layer: int, inner_norm: bool) -> nn.Module:
            inner = norm("attn_inner", geometry.n_heads * geometry.head_dim, layer) if inner_norm else nn.Identity()
            rotates = self.position_at(layer).turns_keys(layer)
            site_norm = partial(norm, layer=layer)
            sizes = geometry.at(layer)
            conv = partial(CONV.build_at, layer, config.conv, sizes)
            parts = MixerParts(config, sizes, rotates, inner, self.param.scores, site_norm, conv)
            return mixer_at(layer, config.mixer, parts)

        def ffn(layer: int, inner_norm: bool) -> nn.Module:
            inner = norm("ffn_inner", geometry.d_ff, layer) if inner_norm else nn.Identity()
            sizes = geometry.at(layer)
            conv = partial(CONV.build_at, layer, config.conv, sizes)
            return FFN.build_at(layer, config.ffn, FFNParts(sizes, resolved.ffn_bias, model.dropout, inner, conv))

        self.geometry = geometry
        self.param = param = PARAM.build(config.param, geometry)
        self.embedding = Table(vocab_size, resolved.d_embed, role="embedding")
        narrow = resolved.d_embed != model.d_model
        self.project_in = Linear(resolved.d_embed, model.d_model, False, SMALL_MAP) if narrow else nn.Identity()
        self.project_out = Linear(model.d_model, resolved.d_embed, False, SMALL_MAP) if narrow else nn.Identity()
        scale = torch.tensor(model.d_model**0.5)
        self.embed_scale = nn.Parameter(scale) if resolved.embed_scale == "learned" else None
        fixed = {"sqrt_d": model.d_model**0.5, "learned": None, "off": None}
        self.fixed_embed_scale = fixed.get(resolved.embed_scale, resolved.embed_scale)  # type: ignore[arg-type]
        self.sink = Table(1, model.d_model, role="embedding") if config.sink_token else None
        self.position = POSITION.build(config.position, geometry)
        self.without_position = self.position.without(geometry)
        self.embed_norm = norm("embed") if config.embed_norm else nn.Identity()
        self.dropout = nn.Dropout(model.dropout)
        self.blocks = nn.ModuleList()
        for layer in range(model.n_layers):
            branches = partial(mixer, layer), partial(ffn, layer)
            parts = Parts(*branches, partial(norm, layer=layer), geometry.at(layer), layer)
            self.blocks.append(PLACEMENT.build(config.placement, parts))
        self.final_norm = norm("final") if resolved.final_norm else nn.Identity()
        scale = None if config.logit_scale == "off" else config.logit_scale
        if param.logits is not None:
            scale = param.logits * (scale or 1.0)
        tied, width = config.tie_embeddings, resolved.d_embed
        self.head = HEAD.build(config.head, geometry, width, tied, config.head_bias, scale)
        for linear in self.blocks.modules():
            if isinstance(linear, Linear) and linear.roles["weight"] in BRANCH_OUTPUTS:
                linear.multiplier = param.branches
        self.product = chosen_product()
        self.recompute = config.train.activation_checkpointing
        self.softcap = None if config.final_softcap == "off" else config.final_softcap

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.logits(self.hidden(tokens_BT), self.head_weight)

    def constrain(self) -> None:
        """Apply the parametrization's constraint on the weights, if it has one."""
        if self.param.constrains:
            roles = parameter_roles(self)
            self.param.constrain((roles[name], weight.data) for name, weight in self.named_parameters())

    @torch.no_grad()
    def update_state(self, sums: Mapping[str, Tensor]) -> None:
        """Call the `after_step` of every module that has one, with what the step's passes summed up."""
        for module in self.modules():
            if after_step := getattr(module, "after_step", None):
                after_step(sums)

    @property
    def head_weight(self) -> Tensor:
        """The matrix that the head multiplies `hidden` by, (V, D), or (V, D + 1) with a bias."""
        return self.head.matrix(self.embedding.weight)

    def context(self, tokens_BT: Tensor) -> Context:
        """The context of a forward pass over these tokens."""
        positions = [self.position_at(layer) for layer in range(len(self.blocks))]
        return Context(tokens_BT, positions, int(self.sink is not None))

    def position_at(self, layer: int) -> Position:
        """The position scheme of a layer."""
        return self.without_position if layer in self.geometry.nope_layers else self.position

    @property
    def init_gains(self) -> dict[str, float]:
        """The placement's factors on initial standard deviations, by role."""
        return self.blocks[0].init_gains  # type: ignore[return-value]

    def logits(self, x_BTD: Tensor, weight_VD: Tensor) -> Tensor:
        """The logits that the head computes from the residual stream with a weight."""
        logits_BTV = self.product(x_BTD, weight_VD)
        return logits_BTV if self.softcap is None else self.softcap * torch.tanh(logits_BTV / self.softcap)

    def hidden(self, tokens_BT: Tensor, context: Context | None = None) -> Tensor:
        """The rows (B, T, D) that the head multiplies. Inside the blocks the sink token precedes the text.

        Args:
            context: Receives the losses and figures of options. By default they are dropped.
        """
        context = self.context(tokens_BT) if context is None else context
        x_BTD = self.position.embed(self.project_in(self._scaled(self.embedding(tokens_BT))))
        if self.sink is not None:
            x_BTD = torch.cat((self._scaled(self.sink.weight).expand(len(x_BTD), 1, -1), x_BTD), 1)
        stream = self.blocks[0].enter(self.dropout(self.embed_norm(x_BTD)))  # type: ignore[reportCallIssue]
        for block in self.blocks:
            if self.recompute and torch.is_grad_enabled():
                stream, *added = checkpoint(_recomputed, block, stream, context, use_reentrant=False)  # type: ignore[reportGeneralTypeIssues]
                context.take(*added)
            else:
                stream = block(stream, context)
        x_BTD = self.blocks[-1].leave(stream, self.final_norm, context)  # type: ignore[reportCallIssue]
        return self.head.rows(self.project_out(x_BTD if self.sink is None else x_BTD[:, 1:]), context)

    def _scaled(self, x_BTD: Tensor) -> Tensor:
        if self.embed_scale is not None:
            x_BTD = x_BTD * self.embed_scale
        return x_BTD if self.fixed_embed_scale is None else x_BTD * self.fixed_embed_scale


def _recomputed(block: nn.Module, stream: Any, context: Context) -> tuple[Any, ...]:
    """A block's stream, and what it added to the context: a recomputation must not add it a second time."""
    context = context.for_one_block()
    stream = block(stream, context)
    return stream, context.store, context.losses, context.figures, context.sums


def build_model(config: RunConfig, vocab_size: int = 256) -> GPT:
    """The model of a configuration with its initial values, on the CPU.

    `model.z_hashes` holds the hash of each parameter's z (see axes/init.py).
    """
    with products(config.train.linear):
        model = GPT(config, vocab_size)
    init = INIT.build(config.resolved.init, model.geometry)
    model.z_hashes = initialise(model, config.seed, init, model.init_gains, model.param)
    model.constrain()
    return model


_FEW_PRODUCTS = 2**30
"""Multiplications of a forward pass that take the CPU less time than the meta device takes to start."""


def countable_model(config: RunConfig, vocab_size: int = 256) -> GPT:
    """The model without initial values, for counting parameters and FLOPs.

    A small model is on the CPU, where a pass takes milliseconds. Others are on the meta device, which needs no memory
    and no compute, but whose kernels are in Python and import the compiler. That takes as long as importing PyTorch.
    """
    model = config.model
    products = model.context * (model.n_layers * model.d_model * (12 * model.d_model + model.context))
    products += model.context * model.d_model * vocab_size
    with torch.device("cpu" if products < _FEW_PRODUCTS else "meta"), torch.no_grad():
        counted = GPT(config, vocab_size)
        for parameter in counted.parameters():
            parameter.zero_()  # the values in uninitialized memory can make products thirty times slower
    return counted
