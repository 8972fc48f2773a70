"""Low-rank adapters (Hu et al., arXiv 2106.09685): the weights stay as they are, and beside each of a block's matrices two small ones are trained.

y = W x + b + (alpha / rank) B A x, with A (rank, in) random and B (out, rank) zero at first, so a run starts from exactly the model that it
adapts. Only A and B have gradients and optimizer state, and only they are exchanged. Everything beside training (text, export, a branch)
reads W + (alpha / rank) B A in place of W, and knows of no adapters.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from data.order import derive_seed
from engine import matmul
from engine.errors import UserError
from model import GPT, Block, Linear, ModelConfig

if TYPE_CHECKING:
    from engine.checkpoint import Read, Source, Sources
    from engine.config import Config

PARAMETERS = (".lora_a", ".lora_b")
BLOCK = 256  # rows of a matrix that are merged at a time


class LoraLinear(Linear):
    """A Linear whose own weight and bias are as they were, with an adapter beside it: (..., in) -> (..., out)."""

    def __init__(self, linear: Linear, rank: int, scale: float):
        super().__init__(linear.in_features, linear.out_features, device="meta")
        self.weight, self.bias, self.scale = linear.weight, linear.bias, scale
        self.lora_a = torch.nn.Parameter(linear.weight.new_empty(rank, linear.in_features))
        self.lora_b = torch.nn.Parameter(linear.weight.new_empty(linear.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., in) -> (..., out), in the type of autocast where it is on."""
        # its two gradients meet here, in the computing type, before they meet others': FSDP's hook on the input of a group's first Linear, which
        # is q, would make another order of that sum, and other bits than one process has
        kind = x.device.type
        x = x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else matmul.same(x.view_as(x), x)
        return torch.add(super().forward(x), matmul.linear(matmul.linear(x, self.lora_a), self.lora_b), alpha=self.scale)


def resolve(config: Config, model_config: ModelConfig) -> None:
    """Fills in lora_alpha and lora_targets of a run's settings; UserError where the blocks of a ModelConfig have no such adapters."""
    c = config
    if not c.lora_rank:
        c.lora_alpha, c.lora_targets = None, "all"  # of no effect, and no difference to a resumed run
        return
    with torch.device("meta"):
        shapes = {name.rpartition(".")[2]: m.weight.shape for name, m in Block(model_config).named_modules() if isinstance(m, Linear)}
    asked = [name.strip() for name in c.lora_targets.split(",")]
    targets = list(shapes) if asked == ["all"] else [name for name in shapes if name in asked]
    if unknown := [name for name in asked if name not in shapes and asked != ["all"]]:
        raise UserError(f"lora_targets={c.lora_targets}: a block of this model has no Linear {', '.join(map(repr, unknown))}: expected all, or some of "
                        f"{','.join(shapes)}")
    smallest = min(targets, key=lambda name: min(shapes[name]))
    if c.lora_rank > min(shapes[smallest]):
        raise UserError(f"lora_rank={c.lora_rank} is above the smaller side of the matrix {smallest}, {' x '.join(map(str, shapes[smallest]))}: "
                        f"{min(shapes[smallest])} at most, and much less is usual")
    c.lora_alpha, c.lora_targets = 2.0 * c.lora_rank if c.lora_alpha is None else c.lora_alpha, ",".join(targets)


def add_adapters(model: GPT, config: Config) -> None:
    """Freezes a GPT and gives the blocks' Linears that resolve() has found adapters, without values yet; nothing where lora_rank is 0."""
    if not config.lora_rank:
        return
    model.requires_grad_(False)
    for block in model.blocks:
        for part in block.children():
            for name, linear in list(part.named_children()):
                if isinstance(linear, Linear) and name in config.lora_targets.split(","):
                    setattr(part, name, LoraLinear(linear, config.lora_rank, config.lora_alpha / config.lora_rank))


def first_values(parameters: Mapping[str, torch.Tensor], seed: int) -> Sources:
    """{name: (shape, function of a slice that draws those rows)} of the adapters among {name: parameter}, functions of (seed, name): A uniform
    in +-1/sqrt(in), as the paper's own code draws it, and B zero."""
    def draw(name, shape, rows):
        if name.endswith(".lora_b"):
            return torch.zeros(shape)[rows]
        bound = 1 / math.sqrt(shape[1])
        return torch.empty(shape).uniform_(-bound, bound, generator=torch.Generator().manual_seed(derive_seed("init", seed, name)))[rows]

    return {name: (p.shape, functools.partial(draw, name, p.shape)) for name, p in parameters.items() if name.endswith(PARAMETERS)}


def merged(sources: Sources, settings: dict[str, Any], where: str) -> Sources:
    """sources {name: (shape, function of a slice that reads those rows)} of a checkpoint trained under `settings`, without adapters: each
    weight that has one is read as W + (alpha / rank) B A. UserError where they do not fit together."""
    found = {name: source for name, source in sources.items() if not name.endswith(PARAMETERS)}
    for stem in sorted({name.rpartition(".")[0] for name in sources.keys() - found.keys()}):
        weight, a, b = (sources.get(f"{stem}.{part}") for part in ("weight", "lora_a", "lora_b"))
        rank, alpha = (settings.get(key) for key in ("lora_rank", "lora_alpha"))
        fits = weight and a and b and len(weight[0]) == 2 and (list(a[0]), list(b[0])) == ([rank, weight[0][1]], [weight[0][0], rank])
        if not fits or rank < 1 or type(alpha) not in (int, float) or not 0 < alpha < math.inf:
            raise UserError(f"{where} is damaged: the adapter of {stem} does not fit its weight, or lora_rank={rank} and lora_alpha={alpha}")
        found[f"{stem}.weight"] = weight[0], functools.partial(merged_rows, weight, a[1], b[1], alpha / rank)
    return found


def merged_rows(weight: Source, read_a: Read, read_b: Read, scale: float, rows: slice) -> torch.Tensor:
    """Some rows of W + scale B A. B A is made in blocks of rows that do not follow which ones are asked for: the same bits for any shard."""
    (count, _), read = weight
    first, behind, _ = rows.indices(count)
    found = read(rows).clone()
    if behind <= first:
        return found
    start = first - first % BLOCK
    stop = min(count, -(-behind // BLOCK) * BLOCK)
    a, b = read_a(slice(None)), read_b(slice(start, stop))
    for at in range(start, stop, BLOCK):
        part = (b[at - start:at - start + BLOCK] @ a)[max(0, first - at):behind - at]  # (rows, in)
        found[max(0, at - first):][:len(part)].add_(part, alpha=scale)
    return found
