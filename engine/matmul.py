"""Products of activations and weight matrices, by the faster of a CPU's two libraries, and what they keep for their backward.

torch's own float32 products on x86 go to MKL, which takes AVX2 on processors that are not Intel's, however wide their units are: on a Zen 5,
oneDNN reaches twice its speed (450 to 500 GFLOP/s on two cores, MKL 210; measured for GPT-2's shapes). On a Zen 3, which has no wider units, MKL is
the faster one (140 GFLOP/s, oneDNN 60 to 100 in a backward). Float32 in, float32 sums, float32 out: only the order of a sum differs.

A product's backward needs its input again. Where that is the output of a norm or of an activation function, whose own inputs are kept anyway,
it is made again from those, to the same bits, in a few percent of the product's time: 6 of the 16 (B, T, C) that a GPT-2 block keeps are spared.
(On a GPU the compiler does that.)
"""

import ctypes
import functools
import itertools
import os
import platform
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

PLAIN = (torch.Tensor, torch.nn.Parameter)
SMALLEST = 1 << 21  # multiplications from which a product is worth oneDNN's 12 us a call
WORTH = 1 << 20  # elements from which a tensor is made again: smaller ones stay in the cache, and cost more time than they are worth
SLICE = 4096  # columns of a wide product that are made at a time: what is freed and taken again stays in the heap (glibc maps more than 32 MB anew)


def set_allocator() -> None:
    """Has glibc map each tensor of 16 MB or more by itself, and keep what is freed of smaller ones. Left alone it takes up to 32 MB from one heap, where
    the holes that tensors of one size leave do not serve the next (an aligned allocation asks for 96 bytes more than it keeps): of a GPT-2's
    activations at 8 x 1024 tokens a fifth more memory was taken than held, and a third more with everything in the heap. Other systems are left alone."""
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(-3, 1 << 24)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


@functools.cache
def processor() -> str:
    """Vendor, family, model and vector units of this machine's CPU, in a line: what a product's last bits depend on besides its shape. Of what
    /proc/cpuinfo says, where there is one."""
    found = {}
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as f:
            for line in itertools.takewhile(str.strip, f):  # the first core's
                name, _, value = line.partition(":")
                found[name.strip()] = value.strip()
    words = [found[name] for name in ("vendor_id", "cpu family", "model") if name in found] or [platform.machine()]
    return " ".join([*words, torch.backends.cpu.get_cpu_capability()])


def prefers_onednn(processor: str) -> bool:
    """Whether oneDNN's products are the faster ones on a `processor()`: AMD's from Zen 5 (family 26) on, with AVX-512."""
    words = processor.split()
    return words[0] == "AuthenticAMD" and int(words[1]) >= 26 and words[-1] == "AVX512" and torch.backends.mkldnn.is_available()


ONEDNN = prefers_onednn(processor())


def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (..., K) weight^T (N, K) + bias, of CPU float32 tensors of any strides, with no gradient."""
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "") if ONEDNN else F.linear(x, weight, bias)


def serves(x: torch.Tensor, other: torch.Tensor, columns: int) -> bool:
    """Whether a product of x (..., K) that has so many columns is made here: it pays, and plain values are asked for, not a
    compiler's trace, another device or type, or shards. A function of shapes and settings alone, as last bits must be."""
    return (x.device.type == "cpu" and x.dtype == other.dtype == torch.float32 and x.numel() * columns >= SMALLEST
            and type(x) in PLAIN and type(other) in PLAIN and not torch.is_autocast_enabled("cpu") and not torch.compiler.is_compiling())


def by_onednn(x: torch.Tensor, other: torch.Tensor, columns: int) -> bool:
    """Whether a product that serves() goes to oneDNN as well."""
    return ONEDNN and serves(x, other, columns)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, value: bool | None = None) -> torch.Tensor:
    """torch.nn.functional.linear. value=False: only its place in autograd's graph is asked for, and what it returns has no values; True: the
    value, of a call that will be made again so."""
    remade, inputs = getattr(x, "remade", (None, ()))
    if not serves(x, weight, weight.size(0)) or not ONEDNN and remade is None and value is None:
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias, value, remade, inputs)


def mm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x (N, K) weight (K, M), with no gradient."""
    return multiply(x, weight.t()) if by_onednn(x, weight, weight.size(1)) else x @ weight


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, value, remade, inputs):
        ctx.remade, keep = remade, ctx.needs_input_grad[1]
        if remade and keep:
            remade.readers += 1
        ctx.save_for_backward(weight, *((inputs if remade else (x,)) if keep else ()))
        return x.new_empty(*x.shape[:-1], weight.size(0)) if value is False else multiply(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        weight, *kept = ctx.saved_tensors
        rows, d_x, d_weight, d_bias = d_out.flatten(0, -2), None, None, None
        if ctx.needs_input_grad[1]:
            x = ctx.remade(*kept) if ctx.remade else kept[0]
            d_weight = multiply(rows.t(), x.flatten(0, -2).t())
            del x
        if ctx.needs_input_grad[0]:
            d_x = multiply(rows, weight.t()).view(*d_out.shape[:-1], -1)
        if ctx.needs_input_grad[2]:
            d_bias = rows.sum(0)
        return d_x, d_weight, d_bias, None, None, None


class Remade:
    """A tensor that the products which read it do not keep: in their backward the first makes it again by `function`, to the same bits, and the
    last lets it go."""

    def __init__(self, function):
        self.function, self.readers, self.left, self.value = function, 0, 0, None

    def __call__(self, *inputs):
        if self.value is None:
            self.value, self.left = self.function(*inputs), self.readers
        value, self.left = self.value, self.left - 1
        if not self.left:
            self.value = None
        return value


def cheap(out: torch.Tensor, function: Callable, *inputs: torch.Tensor | None) -> torch.Tensor:
    """Says of `out`, the value of function(*inputs), that products which read it may keep the inputs instead; returns it. The function holds
    no tensors of its own: a parameter that FSDP gathers is another one in the backward."""
    if out.numel() >= WORTH and keeps(out):
        out.remade = Remade(function), inputs  # type: ignore[attr-defined]
    return out


def same(view: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`view`, a view of all of x, of which is said what cheap() says of x."""
    if hasattr(x, "remade"):
        view.remade = x.remade  # type: ignore[attr-defined]
    return view


def keeps(*tensors: torch.Tensor) -> bool:
    """Whether autograd keeps something of an operation on these, and they are ordinary CPU float32 tensors in eager code that asks for no
    other type."""
    return (torch.is_grad_enabled() and not torch.compiler.is_compiling() and not torch.is_autocast_enabled("cpu")
            and all(t.device.type == "cpu" and t.dtype == torch.float32 and type(t) in PLAIN for t in tensors))


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """torch.nn.functional.layer_norm over the last dimension."""
    def function(x, weight, bias):
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    return cheap(function(x, weight, bias), function, x, weight, bias)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """torch.nn.functional.rms_norm over the last dimension."""
    def function(x, weight):
        return F.rms_norm(x, weight.shape, weight, eps)
    if not keeps(x, weight):
        return function(x, weight.type_as(x))  # of one type: the fused kernel wants it
    return cheap(_RMSNorm.apply(x, weight, eps, function), function, x, weight)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up (arXiv 2002.05202)."""
    if not keeps(gate, up):
        return F.silu(gate) * up
    return cheap(_SwiGLU.apply(gate, up), _SwiGLU.function, gate, up)


def relu2(up: torch.Tensor) -> torch.Tensor:
    """The square of relu(up)."""
    if not keeps(up):
        return F.relu(up).square()
    return cheap(_ReLU2.apply(up), _ReLU2.function, up)


def gelu(up: torch.Tensor, approximate: str) -> torch.Tensor:
    """torch.nn.functional.gelu."""
    def function(up):
        return F.gelu(up, approximate=approximate)
    return cheap(function(up), function, up)


class _RMSNorm(torch.autograd.Function):
    """torch's own keeps its output too on a CPU."""

    @staticmethod
    def forward(ctx, x, weight, eps, function):
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return function(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        x, weight = ctx.saved_tensors
        scale = x.square().mean(-1, keepdim=True).add_(ctx.eps).rsqrt_()
        normed, d_weight = x * scale, None
        if ctx.needs_input_grad[1]:
            d_weight = (d_out * normed).flatten(0, -2).sum(0)
        d = d_out * weight
        along = (d * normed).mean(-1, keepdim=True)
        return d.sub_(normed.mul_(along)).mul_(scale), d_weight, None, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def function(gate, up):
        return F.silu(gate).mul_(up)

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return _SwiGLU.function(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        gate, up = ctx.saved_tensors
        d_gate = torch.ops.aten.silu_backward(d_out * up, gate)
        return d_gate, F.silu(gate).mul_(d_out)


class _ReLU2(torch.autograd.Function):
    @staticmethod
    def function(up):
        return F.relu(up).square_()

    @staticmethod
    def forward(ctx, up):
        ctx.save_for_backward(up)
        return _ReLU2.function(up)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        up, = ctx.saved_tensors
        return F.relu(up).mul_(2).mul_(d_out)


def product_into(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """out (N, V) = x (N, K) weight^T (V, K), without a second (N, V)."""
    if not by_onednn(x, weight, len(weight)):
        return torch.mm(x, weight.t(), out=out)
    for v in range(0, len(weight), SLICE):
        out[:, v:v + SLICE] = multiply(x, weight[v:v + SLICE])
    return out


def add_outer(total: torch.Tensor | None, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """total (V, K) + y^T (N, V) x (N, K), in place; a new tensor where total is None."""
    if not by_onednn(x, y, y.size(1)):
        return torch.mm(y.t(), x) if total is None else total.addmm_(y.t(), x)
    first = total is None
    total = y.new_empty(y.size(1), x.size(1)) if first else total
    for v in range(0, len(total), SLICE):
        part, to = multiply(y[:, v:v + SLICE].t(), x.t()), total[v:v + SLICE]
        to.copy_(part) if first else to.add_(part)
    return total
