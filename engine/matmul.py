"""Products of activations and weight matrices, on a CPU by oneDNN.

torch's own float32 products on x86 go to MKL, which takes AVX2 on processors that are not Intel's, however wide their units are:
on a Zen 5, oneDNN reaches twice its speed (450 to 500 GFLOP/s on two cores, MKL 210; measured for GPT-2's shapes), elsewhere about
the same. Float32 in, float32 sums, float32 out: only the order of a sum differs.
"""

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

PLAIN = (torch.Tensor, torch.nn.Parameter)
SMALLEST = 1 << 21  # multiplications from which a product is worth oneDNN's 12 us a call
SLICE = 4096  # columns of a wide product that are made at a time: what is freed and taken again stays in the heap (glibc maps more than 32 MB anew)


def multiply(x, weight, bias=None):
    """x (..., K) weight^T (N, K) + bias, of CPU float32 tensors of any strides."""
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")


def serves(x, other, columns):
    """Whether a product of x (..., K) that has so many columns goes to oneDNN: it is there, it pays, and plain values are asked for, not a
    compiler's trace, another device or type, or shards. A function of shapes and settings alone, as last bits must be."""
    return (x.device.type == "cpu" and x.dtype == other.dtype == torch.float32 and x.numel() * columns >= SMALLEST
            and type(x) in PLAIN and type(other) in PLAIN and torch.backends.mkldnn.is_available()
            and not torch.is_autocast_enabled("cpu") and not torch.compiler.is_compiling())


def linear(x, weight, bias=None):
    """torch.nn.functional.linear."""
    if not serves(x, weight, weight.size(0)):
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias)


def mm(x, weight):
    """x (N, K) weight (K, M), with no gradient."""
    return multiply(x, weight.t()) if serves(x, weight, weight.size(1)) else x @ weight


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return multiply(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        x, weight = ctx.saved_tensors
        rows, d_x, d_weight, d_bias = d_out.flatten(0, -2), None, None, None
        if ctx.needs_input_grad[0]:
            d_x = multiply(rows, weight.t()).view(*d_out.shape[:-1], -1)
        if ctx.needs_input_grad[1]:
            d_weight = multiply(rows.t(), x.flatten(0, -2).t())
        if ctx.needs_input_grad[2]:
            d_bias = rows.sum(0)
        return d_x, d_weight, d_bias


def product_into(out, x, weight):
    """out (N, V) = x (N, K) weight^T (V, K), without a second (N, V)."""
    if not serves(x, weight, len(weight)):
        return torch.mm(x, weight.t(), out=out)
    for v in range(0, len(weight), SLICE):
        out[:, v:v + SLICE] = multiply(x, weight[v:v + SLICE])
    return out


def add_outer(total, y, x):
    """total (V, K) + y^T (N, V) x (N, K), in place; a new tensor where total is None."""
    if not serves(x, y, y.size(1)):
        return torch.mm(y.t(), x) if total is None else total.addmm_(y.t(), x)
    first = total is None
    total = y.new_empty(y.size(1), x.size(1)) if first else total
    for v in range(0, len(total), SLICE):
        part, to = multiply(y[:, v:v + SLICE].t(), x.t()), total[v:v + SLICE]
        to.copy_(part) if first else to.add_(part)
    return total
