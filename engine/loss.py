"""The loss fused with the head: cross-entropy from hidden states, of which the logits of some tokens at a time ever exist."""

import torch

from data.order import IGNORE
from engine import matmul

# Tokens whose logits exist at a time. 512 x 50,304 float32 are 103 MB instead of 1.6 GB for 8 x 1,024 tokens, at the speed
# of one large product. The last bits of a loss depend on it, so it is no setting.
LOSS_CHUNK = 512


def linear_cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, vocab_size: int, divisor: float = 1.0, tensor=None,
                         hits: torch.Tensor | None = None, softmax=None) -> torch.Tensor:
    """Sum over tokens of -log softmax(hidden weight^T)[target], over `divisor`; a float32 scalar.

    hidden (N, C), weight (padded V, C), targets (N,) int64 with IGNORE where there is no label. Columns from
    vocab_size on are padding and count for nothing. The (N, V) logits never exist at once: gradients are made in the
    forward pass, a chunk at a time, in one buffer. With `tensor` (engine.tensor_parallel) each rank of its group has the same number of
    rows of weight, in order, and the same of all else; all get the same loss and the whole gradient of hidden. softmax: softmax_gradient,
    compiled, for whole chunks.
    """
    on = torch.is_autocast_enabled(hidden.device.type)
    dtype = torch.get_autocast_dtype(hidden.device.type) if on else hidden.dtype
    return _LinearCrossEntropy.apply(hidden, weight, targets, vocab_size, divisor, dtype, torch.is_grad_enabled(), tensor, hits, softmax)


class _LinearCrossEntropy(torch.autograd.Function):
    """Products are in `dtype`; sums of the weight's gradient are in float32. In half precision a gradient divided by the tokens
    of a large update is below what float16 holds: there the division waits for the backward pass and its loss scale."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, vocab_size, divisor, dtype, need_grad, tensor, hits, softmax):
        need_grad = need_grad and (hidden.requires_grad or weight.requires_grad)
        half = dtype != torch.float32
        N, V = hidden.size(0), weight.size(0)
        chunk = max(1, min(N, LOSS_CHUNK))
        first = tensor.rank * V if tensor is not None else 0  # of this rank's part of the vocabulary
        w = weight.to(dtype)
        buffer = torch.empty(chunk, V, dtype=dtype, device=hidden.device)
        loss = hidden.new_zeros((), dtype=torch.float32)
        d_hidden = torch.empty_like(hidden) if need_grad else None
        need_weight = need_grad and weight.requires_grad  # a head that is frozen needs none
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight and not N else None
        if not need_grad or tensor is not None or hits is not None:
            softmax = None
        scale = torch.full((), 1.0 if half else 1 / divisor, device=hidden.device) if softmax else None
        for a in range(0, N, chunk):
            h, target = hidden[a:a + chunk].to(dtype), targets[a:a + chunk]
            logits = matmul.product_into(buffer[:h.size(0)], h, w)  # (chunk, V)
            if softmax and len(h) == LOSS_CHUNK:  # each other size would be compiled anew
                part, d_logits = softmax(logits, target, scale, vocab_size)
                loss += part / divisor
            else:
                logits[:, max(0, vocab_size - first):] = float("-inf")
                log_p = logits.float()  # the buffer itself in float32
                labelled = target != IGNORE
                if tensor is None:
                    torch.log_softmax(log_p, dim=-1, out=log_p)
                    here = labelled
                else:
                    tensor.log_softmax_(log_p)
                    here = labelled & (target >= first) & (target < first + V)
                index = torch.where(here, target - first, 0)[:, None]  # (chunk, 1)
                loss -= log_p.gather(1, index)[:, 0].masked_fill(~here, 0).sum() / divisor
                if hits is not None:
                    hits[a:a + chunk] = log_p.argmax(-1) == target if tensor is None else tensor.hits(log_p, here, index)
                if not need_grad:
                    continue
                d_logits = log_p.exp_()  # softmax - onehot, nothing where there is no label
                d_logits.scatter_add_(1, index, -here[:, None].to(d_logits.dtype))
                d_logits *= (labelled if half else labelled / divisor)[:, None]
                d_logits = d_logits.to(dtype)
            if half:
                d_hidden[a:a + chunk] = d_logits @ w
            else:
                d_hidden[a:a + chunk] = matmul.mm(d_logits, w)
            if need_weight and half:
                part = (d_logits.t() @ h).float()
                d_weight = part if d_weight is None else d_weight.add_(part)
            elif need_weight:
                d_weight = matmul.add_outer(d_weight, d_logits, h)
        if tensor is not None:
            tensor.add_up(loss)
            if need_grad:
                tensor.add_up(d_hidden)
        if need_grad:
            ctx.save_for_backward(d_hidden, d_weight)
            ctx.late = 1 / divisor if half else 1
        return loss

    @staticmethod
    def backward(ctx, d_loss):
        d_hidden, d_weight = ctx.saved_tensors
        if ctx.late != 1 or d_loss.device.type != "cpu" or d_loss != 1:  # looking at it would stall a GPU; a CPU is spared a pass
            d_loss = d_loss * ctx.late
            d_hidden, d_weight = (d_hidden * d_loss).to(d_hidden.dtype), None if d_weight is None else d_weight * d_loss
        return d_hidden, d_weight, *[None] * 8


def softmax_gradient(logits: torch.Tensor, target: torch.Tensor, scale: torch.Tensor, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What lies between the loss's products, for a compiler to make one pass of where eager code makes eight: logits (n, padded V), target (n,) ->
    the sum of the cross-entropies, and the gradient of that times `scale` (0-dim) by the logits, in their type."""
    x, columns = logits.float(), torch.arange(logits.size(1), device=logits.device)
    x = torch.where(columns < vocab_size, x, float("-inf"))
    lse = torch.logsumexp(x, dim=-1, keepdim=True)  # (n, 1)
    labelled = (target != IGNORE)[:, None]
    index = torch.where(labelled, target[:, None], 0)
    loss = torch.where(labelled, lse - x.gather(1, index), 0).sum()
    d_logits = (torch.exp(x - lse) - (columns == index).float()) * torch.where(labelled, scale, 0)
    return loss, d_logits.to(logits.dtype)
