"""Tensor parallelism: the ranks of a group hold a part of every layer each, for layers that do not fit one device.

Megatron-LM's cut (Shoeybi and others, arXiv 1909.08053): a rank has some heads of attention and some columns of the MLP, so that two
collectives a sub-layer are all it takes; between them, where norms and the residual stream work on tokens one by one, it has some tokens
of each sequence (sequence parallelism; Korthikanti and others, arXiv 2205.05198). The embedding is cut by rows of the vocabulary, and
so is the head: a rank has the logits of its part of the vocabulary, and the loss is put together from a few numbers a token.

The cuts are DTensor's plans for the modules of model.py; FSDP then shards what a rank holds (engine/sync.py).
"""

import contextlib
import functools
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from engine.communication import about
from engine.errors import UserError

if TYPE_CHECKING:
    from model import GPT


def parallelize(model: "GPT", mesh) -> None:
    """Cuts a GPT in place over a mesh of one dimension, by DTensor's plans, for every family: all have the one block of model.py."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module

    tokens = Shard(1)  # of the residual stream (B, T, C)
    plan = {"wte": RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens), "head": ColwiseParallel()}
    if model.wpe is not None:
        plan["wpe"] = plan["wte"]
    for i in range(len(model.blocks)):
        of_block = {
            "norm1": SequenceParallel(), "norm2": SequenceParallel(),
            "attn": PrepareModuleInput(input_layouts=(tokens, None, None, None), desired_input_layouts=(Replicate(), None, None, None)),
            "mlp": PrepareModuleInput(input_layouts=(tokens,), desired_input_layouts=(Replicate(),)),
            **{f"attn.{name}": ColwiseParallel() for name in "qkv"}, "attn.o": RowwiseParallel(output_layouts=tokens),
            # a rank's heads: (B, T, H / tp, D), cut in the third dimension
            "attn.q_norm": SequenceParallel(sequence_dim=2, use_local_output=True), "attn.k_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
            "mlp.up": ColwiseParallel(), "mlp.gate": ColwiseParallel(), "mlp.down": RowwiseParallel(output_layouts=tokens),
        }
        plan |= {f"blocks.{i}.{name}": style for name, style in of_block.items()}
    there = {name for name, _ in model.named_modules()}
    parallelize_module(model, mesh, {name: style for name, style in plan.items() if name in there}, src_data_rank=None)
    model.tensor = TensorParallel(mesh.get_group())


def cut_dim(name: str) -> int | None:
    """The dimension in which a parameter of model.py is cut, by its name; None where each rank has the whole. parallelize() does it."""
    module, kind = name.rsplit(".", 2)[-2:]
    if module in ("wte", "wpe", "head", "q", "k", "v", "up", "gate"):
        return 0
    return 1 if module in ("o", "down") and kind == "weight" else None


class TensorParallel:
    """One rank's place in a group whose ranks share layers: what GPT.forward does beside the plans."""

    def __init__(self, group):
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        self.waiting = contextlib.nullcontext

    def wait_apart(self, waiting, dtensor: bool) -> None:
        """waiting: makes a context that is entered while other ranks are waited for, by DTensor too where that is asked for (not inside compiled
        blocks, which would be cut at each)."""
        import torch.distributed._functional_collectives as functional

        self.waiting, plain = waiting, getattr(functional.wait_tensor, "__wrapped__", functional.wait_tensor)  # an earlier run's is replaced

        @functools.wraps(plain)
        def wait_tensor(tensor):
            with waiting():
                return plain(tensor)

        functional.wait_tensor = wait_tensor if dtensor else plain

    def even(self, tokens: torch.Tensor) -> torch.Tensor:
        """(B, T) filled up so that T divides by tp: what comes later changes nothing before it."""
        return torch.nn.functional.pad(tokens, (0, -tokens.size(1) % self.size))

    def whole(self, x: torch.Tensor, T: int) -> torch.Tensor:
        """(B, T / tp, C) of each rank -> (B, T, C) on all. They all do the same with it, so a gradient goes back without a sum."""
        return _Whole.apply(x, self)[:, :T]

    def logits(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """(B, T, C) on all ranks, and each one's rows (V / tp, C) of the head -> (B, T, V), while no gradient is asked for."""
        part = torch.nn.functional.linear(x, weight)
        return torch.cat(self.gather(part).unbind(), dim=-1)

    @about("activations")
    def gather(self, t: torch.Tensor) -> torch.Tensor:
        """(tp, *shape of t): every rank's."""
        t = t.contiguous()
        out = t.new_empty(self.size, *t.shape)
        with self.waiting():
            dist.all_gather_single(out.view(-1), t.view(-1), group=self.group)
        return out

    @about("activations")
    def add_up(self, t: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, in place."""
        with self.waiting():
            dist.all_reduce(t, group=self.group)
        return t

    def log_softmax_(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits of this rank's part of the vocabulary (N, V / tp) float32 -> log-probabilities in the whole of it, in place."""
        lse = self.gather(torch.logsumexp(logits, dim=-1)).logsumexp(dim=0)
        return logits.sub_(lse[:, None])

    def hits(self, log_p: torch.Tensor, here: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Whether the target is the likeliest of the whole vocabulary, (N,) bool: this rank has it where `here` (N,), at index (N, 1)."""
        own = log_p.gather(1, index)[:, 0].masked_fill(~here, float("-inf"))
        best, target = self.gather(torch.stack((log_p.amax(-1), own))).amax(0)
        return target >= best


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tensor):
        ctx.tensor, ctx.tokens = tensor, x.size(1)
        return torch.cat(tensor.gather(x).unbind(), dim=1)

    @staticmethod
    def backward(ctx, d):
        return d.narrow(1, ctx.tensor.rank * ctx.tokens, ctx.tokens).contiguous(), None


def check_tensor(config, place) -> None:
    """UserError where the sizes of the model or the settings of a run do not fit tensor parallelism."""
    c, problems = config, []
    hidden = c.mlp_hidden or (64 if c.mlp == "swiglu" else 4 * c.n_embd)  # swiglu's default is a multiple of 64
    sizes = {"n_head": c.n_head, "n_kv_head": c.n_kv_head or c.n_head, "block_size / cp": c.block_size // c.cp, "mlp_hidden": hidden,
             "a padded vocabulary's multiple": 64}
    if wrong := [f"{name}={n}" for name, n in sizes.items() if n % c.tp]:
        works = [str(t) for t in range(1, place.ranks // c.cp + 1) if place.ranks % (t * c.cp) == 0 and not any(n % t for n in sizes.values())]
        problems.append(f"tp={c.tp} does not divide {', '.join(wrong)}: heads, the MLP's columns, tokens and the vocabulary are dealt out evenly; "
                        f"tp={' or '.join(works)} would work")
    if c.dropout:
        problems.append(f"dropout={c.dropout} with tp={c.tp}: which numbers are dropped would follow the cut of the layers, another curve for each tp; "
                        "dropout=0 would work, or tp=1")
    if c.optimizer == "muon":
        problems.append(f"optimizer=muon with tp={c.tp}: it works on whole matrices, and these are cut in both directions; optimizer=adamw would work, or tp=1")
    if c.lora_rank:
        problems.append(f"lora_rank={c.lora_rank} with tp={c.tp}: adapters are not cut with their matrices yet; tp=1 would work, with parallel=fsdp")
    if problems:
        raise UserError(*problems)
