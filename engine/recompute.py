"""Activation checkpointing (Chen and others, arXiv 1604.06174): what a block keeps for its backward, and what it computes again there.

none: all that the backward needs. selective: all but what is in the MLP, the widest part: its norm and first product are made again from the input
of the sub-layer, attention is not. block: the block's input alone. One kind serves all blocks, or a budget in bytes picks one for each.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from engine import matmul
from engine.errors import UserError

KINDS = ("none", "selective", "block")


def again(function: Callable, block: Any, *args, dropout: bool = True) -> torch.Tensor:
    """function(*args), of which autograd keeps the inputs alone. It is made again up to the input of the block's last product: what comes out of
    that, a fifth of a block's work, no backward needs. dropout: whether there is any in it, whose random numbers have to be the same ones."""
    eager = not torch.compiler.is_compiling() and block._compiled_call_impl is None
    options: dict[str, Any] = {"context_fn": lambda: (with_value(block.mlp.down, True), with_value(block.mlp.down, False))} if eager else {}
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=dropout, **options)


@contextlib.contextmanager
def with_value(linear: torch.nn.Module, value: bool):
    """Inside, a Linear's output has its values, or without them the right shape alone; autograd keeps the same of both."""
    linear.value = value
    try:
        yield
    finally:
        linear.value = None


def kept_bytes(c, element: int) -> dict[str, float]:
    """{kind: bytes that autograd keeps of a block of that kind for one micro-batch}; an estimate. c: a Config with the model's sizes.

    Counted tensor by tensor as Korthikanti and others do (arXiv 2205.05198, section 4.1), for this block: attention is never
    written out (the 5 a s^2 b of the paper is not there), the residual stream is float32. For each token, with e = `element`
    bytes (2 under autocast, else 4), C channels, H and K heads of size D, F = mlp_hidden:

        inputs of the two norms            2 * 4 C
        their outputs, as products read them   2 * e C         (eager autocast makes a copy for each product: 3 e C and, swiglu, 2 e C)
        q, k, v, attention's output        e (2 H + 2 K) D + 4 H    (qk_norm: e (H + K) D more, the norms' inputs)
        mlp                                e F * 2 (gelu, relu2) or 4 (swiglu)
        dropout's masks                    2 C
        adapters                           e lora_rank for each

    Eager float32 on a CPU keeps no large output of a norm or of an activation function (engine.matmul.cheap): mlp e F, swiglu 2 e F.
    torch.compile keeps less too: it computes cheap parts again. selective keeps nothing of the MLP and of its norm but the input, block the
    block's input, 4 C.

    Context parallelism leaves a rank 1 / cp of the tokens; of those, tensor parallelism leaves it 1 / tp of everything but what products
    read and the last norm's input.
    """
    C, F, H, K, D = c.n_embd, c.mlp_hidden, c.n_head, c.n_kv_head, c.head_dim
    tokens, eager, gated = c.batch_size * c.block_size // c.cp, element < 4 and c.compile is False, c.mlp == "swiglu"
    spares = element == 4 and c.device == "cpu" and not c.compile and c.tp == 1
    normed = 0 if spares and tokens * C >= matmul.WORTH else element * C
    activated = 0 if spares and tokens * F >= matmul.WORTH else 2 if gated and not spares else 1
    mask, gathered = C if c.dropout else 0, 4 * C / c.tp if c.tp > 1 else 0  # a norm's output before it is gathered
    targets = c.lora_targets.split(",") if c.lora_rank else []
    attention = (4 * C + mask + element * (2 * H + 2 * K) * D + 4 * H + (element * (H + K) * D if c.qk_norm else 0)) / c.tp
    attention += (3 if eager else 1) * normed + gathered + element * c.lora_rank * sum(t in "qkvo" for t in targets)
    mlp = element * F * ((2 if gated else 1) + activated) / c.tp
    mlp += (2 if eager and gated else 1) * normed + gathered + element * c.lora_rank * sum(t not in "qkvo" for t in targets)
    stream = (4 * C + mask) / c.tp
    return {"none": tokens * (attention + stream + mlp), "selective": tokens * (attention + stream), "block": tokens * 4 * C / c.tp}


def peak_bytes(c, element: int, kinds: list[str]) -> int:
    """What is kept of one micro-batch's forward at the most, with a kind for each block: when the backward starts, or later in it, with one block in full
    again while those behind it are gone. And the last norm's input and the hidden state's gradient, which the loss makes at once, in float32."""
    kept = kept_bytes(c, element)
    before = itertools.accumulate([kept[kind] for kind in kinds[:-1]], initial=0)
    return round(max(before) + kept["none"] + c.batch_size * c.block_size / c.cp * 8 * c.n_embd)


def choose(c, element: int) -> list[str]:
    """A kind for each block: activation_checkpointing's, or where there is an activation_budget, those that cost least of what fits. A function of the
    settings alone, so all ranks choose the same. UserError where nothing fits."""
    if c.activation_budget is None:
        return [c.activation_checkpointing] * c.n_layer
    budget, up = c.activation_budget * 1e9, 2 * c.n_embd * c.mlp_hidden * (2 if c.mlp == "swiglu" else 1)
    # FLOPs a token of what is made again: of a block also its products to q, k, v and o, and causal attention
    flops = {"none": 0, "selective": up, "block": up + 4 * c.n_embd * (c.n_head + c.n_kv_head) * c.head_dim + 2 * c.block_size * c.n_head * c.head_dim}

    def cost(kinds):
        return sum(flops[kind] for kind in kinds)

    # those that keep least come first: the last blocks are gone by the time one of them is there in full
    mixes = [["block"] * b + ["selective"] * s + ["none"] * (c.n_layer - b - s) for b in range(c.n_layer + 1) for s in range(c.n_layer + 1 - b)]
    fitting = [kinds for kinds in mixes if peak_bytes(c, element, kinds) <= budget]
    if fitting:
        return min(fitting, key=cost)

    def least(batch_size):
        return peak_bytes(dataclasses.replace(c, batch_size=batch_size), element, ["block"] * c.n_layer)

    works = [f"activation_budget={math.ceil(least(c.batch_size) / 1e7) / 100:g}"]
    works += [f"batch_size={b}" for b in range(c.batch_size - 1, 0, -1) if least(b) <= budget][:1]
    raise UserError(f"activation_budget={c.activation_budget:g} GB: a micro-batch of {c.batch_size} x {c.block_size} takes "
                    f"{least(c.batch_size) / 1e9:.3g} GB even where all of its blocks are computed again; {' or '.join(works)} would work")


def describe(c, element: int, kinds: list[str]) -> str:
    """What a budget has come to, in a sentence."""
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in KINDS if kind in kinds)
    return (f"activation_budget={c.activation_budget:g} GB: of {len(kinds)} blocks, activation checkpointing is {counts}; "
            f"{peak_bytes(c, element, kinds) / 1e9:.3g} GB by --plan's count")
