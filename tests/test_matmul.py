"""Products by either library are torch's own but for the order of a sum, in both directions, and nobody else's business is touched."""

import pytest
import torch
import torch.nn.functional as F

from engine import matmul

pytestmark = pytest.mark.quick


@pytest.fixture(params=["oneDNN", "torch's"])
def library(request, monkeypatch):
    """Which library multiplies, whichever this machine's processor would choose."""
    if request.param == "oneDNN" and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch is built without oneDNN")
    monkeypatch.setattr(matmul, "ONEDNN", request.param == "oneDNN")


@pytest.mark.parametrize("processor, onednn", [("AuthenticAMD 26 2 AVX512", True), ("AuthenticAMD 26 2 AVX2", False), ("AuthenticAMD 25 1 AVX2", False),
                                               ("AuthenticAMD 25 17 AVX512", False), ("GenuineIntel 6 143 AVX512", False), ("aarch64 DEFAULT", False)])
def test_the_library_is_chosen_by_the_processor(processor, onednn):
    assert matmul.prefers_onednn(processor) == (onednn and torch.backends.mkldnn.is_available())
    assert matmul.prefers_onednn(matmul.processor()) == matmul.ONEDNN
    assert matmul.processor().split()[-1] == torch.backends.cpu.get_cpu_capability()


def gradients(linear, x, weight, bias):
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight, *([] if bias is None else [bias]))]
    out = linear(*leaves, *([None] if bias is None else []))
    out.backward(torch.linspace(-1, 1, out.numel()).view(out.shape))
    return [out.detach(), *[t.grad for t in leaves]]


@pytest.mark.parametrize("shape", [(2, 65, 129, 257), (3, 50, 130, 192)])
@pytest.mark.parametrize("biased", [True, False])
def test_values_and_gradients_are_torchs(shape, biased, library):
    torch.manual_seed(0)
    B, T, K, N = shape
    x, weight, bias = torch.randn(B, T, K), torch.randn(N, K), torch.randn(N) if biased else None
    assert matmul.serves(x, weight, N)
    for ours, theirs in zip(gradients(matmul.linear, x, weight, bias), gradients(F.linear, x, weight, bias), strict=True):
        assert ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=1e-5, atol=1e-3)
        assert ours.is_contiguous()


def test_only_what_needs_a_gradient_gets_one(library):
    x, weight = torch.randn(64, 256), torch.nn.Parameter(torch.randn(256, 256))
    matmul.linear(x, weight).sum().backward()
    assert x.grad is None and weight.grad is not None
    frozen, x = torch.randn(256, 256), torch.randn(64, 256, requires_grad=True)
    matmul.linear(x, frozen).sum().backward()
    assert x.grad is not None and frozen.grad is None


def test_wide_products_in_slices_are_the_whole(library):
    torch.manual_seed(0)
    V = 2 * matmul.SLICE + 100
    x, weight = torch.randn(40, 64), torch.randn(V, 64)
    out = torch.empty(40, V)
    assert torch.allclose(matmul.product_into(out, x, weight), x @ weight.t(), atol=1e-4) and matmul.serves(x, weight, V)
    total = matmul.add_outer(None, out, x)
    assert torch.allclose(total, out.t() @ x, rtol=1e-4, atol=1e-2)
    again = matmul.add_outer(total, out, x)
    assert again is total and torch.allclose(again, 2 * (out.t() @ x), rtol=1e-4, atol=1e-2)
    assert torch.allclose(matmul.mm(out, weight), out @ weight, rtol=1e-4, atol=1e-2)


NATIVE: dict = {
    "rms_norm": (lambda x, w: matmul.rms_norm(x, w, 1e-6), lambda x, w: F.rms_norm(x, w.shape, w, 1e-6), [(8, 33, 96), (96,)]),
    "layer_norm": (lambda x, w: matmul.layer_norm(x, w, None, 1e-6), lambda x, w: F.layer_norm(x, w.shape, w, None, 1e-6), [(8, 33, 96), (96,)]),
    "swiglu": (matmul.swiglu, lambda gate, up: F.silu(gate) * up, [(8, 33, 96)] * 2), "relu2": (matmul.relu2, lambda up: F.relu(up).square(), [(8, 33, 96)]),
    "gelu": (lambda up: matmul.gelu(up, "tanh"), lambda up: F.gelu(up, approximate="tanh"), [(8, 33, 96)]),
}


@pytest.mark.parametrize("name", NATIVE)
def test_what_is_made_again_is_torchs_and_keeps_nothing_else(name, library, monkeypatch):
    """Values and gradients of an operation and of the two products that read it; what autograd keeps are its inputs and the weights."""
    ours, native, shapes = NATIVE[name]
    torch.manual_seed(0)
    values, weights, found = [torch.randn(s) for s in shapes], [torch.randn(128, 96), torch.randn(96, 96)], []
    for function, worth in ((native, 1 << 60), (ours, 1 << 60), (ours, 0)):
        monkeypatch.setattr(matmul, "WORTH", worth)
        leaves, kept = [t.clone().requires_grad_() for t in (*values, *weights)], {}

        def pack(t):
            kept[t.untyped_storage().data_ptr()] = t
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            read = function(*leaves[:-2])
            out = [matmul.linear(read, w) for w in leaves[-2:]]
        for _ in range(2):  # a second backward makes it again
            sum(o.square().sum() for o in out).backward(retain_graph=True)
        found.append((read.detach(), *[t.grad for t in leaves]))
        large = [t for t in kept.values() if t.numel() == read.numel() and t.data_ptr() not in [v.data_ptr() for v in leaves]]
    for theirs, kept_ours, remade in zip(*found, strict=True):
        assert torch.equal(kept_ours, remade) and (remade - theirs).abs().max() <= 2e-6 * theirs.abs().max()
    assert not large and read.remade[0].value is None


def test_small_other_typed_and_compiled_ones_are_left_to_torch():
    x, weight = torch.randn(8, 16), torch.randn(16, 16)
    assert not matmul.serves(x, weight, 16)
    large, wide = torch.randn(256, 256), torch.randn(256, 256)
    assert not matmul.serves(large.double(), wide.double(), 256)
    assert not matmul.serves(large.bfloat16(), wide.bfloat16(), 256)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not matmul.serves(large, wide, 256)
        assert matmul.linear(large, wide).dtype == torch.bfloat16
    assert not matmul.serves(large.to("meta"), wide.to("meta"), 256)
    assert torch.equal(matmul.linear(x, weight), F.linear(x, weight))


def test_the_same_rows_give_the_same_bits_whatever_memory_they_lie_in(library):
    """FSDP gathers a weight to wherever there is room: the address must not show in the last bit."""
    torch.manual_seed(0)
    x, weight = torch.randn(96, 200), torch.randn(176, 200)
    for offset in (0, 1, 3, 7, 16):
        moved = torch.empty(weight.numel() + offset)[offset:].view_as(weight).copy_(weight)
        shifted = torch.empty(x.numel() + offset)[offset:].view_as(x).copy_(x)
        for ours, first in zip(gradients(matmul.linear, shifted, moved, None), gradients(matmul.linear, x, weight, None), strict=True):
            assert torch.equal(ours, first)
