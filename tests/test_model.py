"""model.py as GPT-2 is GPT-2, its loss is the cross-entropy, its cache changes nothing, and padding is never sampled."""

import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import engine.loss as loss_module
import model as model_module
from data.order import IGNORE
from engine import matmul
from engine.families import open_weights
from engine.loss import linear_cross_entropy
from engine.packed import packed_weights
from model import GPT, KVCache, ModelConfig, complete, generate, pick
from sample import load_model

pytestmark = pytest.mark.quick

SHAPES = {
    "gpt2": {},
    "nanogpt": dict(bias=False),
    "llama": dict(norm="rmsnorm", pos="rope", mlp="swiglu", n_kv_head=1, tie_embeddings=False, bias=False),
    "qwen3": dict(norm="rmsnorm", pos="rope", mlp="swiglu", n_kv_head=2, qk_norm=True, head_dim=20, bias=False),
    "relu2": dict(norm="rmsnorm", pos="rope", mlp="relu2", bias=False),
}


def build(seed=0, **settings):
    c = ModelConfig(**{"block_size": 32, "vocab_size": 257, "n_layer": 3, "n_head": 4, "n_embd": 48, **settings})
    assert not c.problems()
    model = GPT(c)
    model.init_weights(seed)
    return model


def noisy(model):
    """Every parameter random: biases and norms away from 0 and 1, where their mistakes would hide."""
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model


def tokens(rows, length, vocab=257, seed=0):
    return torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------------------------------------- GPT-2 is GPT-2


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    reference = GPT2LMHeadModel(GPT2Config(vocab_size=259, n_positions=40, n_embd=48, n_layer=3, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
                                           attn_pdrop=0.0, bos_token_id=0, eos_token_id=0))
    noisy(reference)
    folder = tmp_path_factory.mktemp("hf")
    reference.save_pretrained(folder)
    return reference, load_model(open_weights(str(folder)), torch.device("cpu"))


def test_losses_and_gradients_equal_those_of_transformers(gpt2):
    reference, ours = gpt2
    x = tokens(3, 40, 259)
    labels = x.clone()
    labels[0, :9] = -100
    expected = reference(x, labels=labels).loss  # shifts by itself
    targets = labels[:, 1:].masked_fill(labels[:, 1:] == -100, IGNORE)
    loss = ours(x[:, :-1], targets, divisor=(targets != IGNORE).sum())
    assert abs(loss - expected) < 1e-5
    expected.backward()
    loss.backward()
    for layer, (theirs, mine) in enumerate(zip(reference.transformer.h, ours.blocks)):
        qkv = torch.cat([m.weight.grad for m in (mine.attn.q, mine.attn.k, mine.attn.v)]).t()
        pairs = [(theirs.attn.c_attn.weight.grad, qkv), (theirs.attn.c_proj.weight.grad, mine.attn.o.weight.grad.t()),
                 (theirs.mlp.c_fc.weight.grad, mine.mlp.up.weight.grad.t()), (theirs.mlp.c_proj.bias.grad, mine.mlp.down.bias.grad),
                 (theirs.ln_1.weight.grad, mine.norm1.weight.grad), (theirs.ln_2.bias.grad, mine.norm2.bias.grad)]
        for a, b in pairs:
            assert a.abs().max() > 1e-4 and torch.allclose(a, b, atol=1e-5, rtol=1e-4), layer
    for a, b in ((reference.transformer.wte, ours.wte), (reference.transformer.wpe, ours.wpe), (reference.transformer.ln_f, ours.norm)):
        assert torch.allclose(a.weight.grad, b.weight.grad[:len(a.weight)], atol=1e-5, rtol=1e-4)
    assert ours.wte.weight.shape[0] == 320 and not ours.wte.weight.grad[259:].any()


def test_logits_and_greedy_text_equal_those_of_transformers(gpt2):
    reference, ours = gpt2
    x = tokens(2, 7, 259, seed=4)
    with torch.no_grad():
        assert torch.allclose(reference(x).logits, ours(x), atol=1e-4)
    expected = reference.generate(x, max_new_tokens=30, do_sample=False, attention_mask=torch.ones_like(x), pad_token_id=0,
                                  eos_token_id=None)[:, 7:]
    assert torch.equal(torch.stack(list(generate(ours, x, 30, temperature=0)), dim=1), expected)


# -------------------------------------------------------------------------------------------------------------- loss


@pytest.mark.parametrize("shape", SHAPES)
def test_the_chunked_loss_is_the_cross_entropy_of_the_logits(shape, monkeypatch):
    monkeypatch.setattr(loss_module, "LOSS_CHUNK", 7)  # many chunks and a shorter last one
    model = noisy(build(**SHAPES[shape]))
    x, y = tokens(3, 32), tokens(3, 32, seed=1)
    y[1, 5:20] = IGNORE
    model(x, y, divisor=10).backward()
    ours = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    expected = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=IGNORE, reduction="sum") / 10
    expected.backward()
    assert abs(model(x, y, divisor=10) - expected) < 1e-5 * expected
    for name, p in model.named_parameters():
        if "attn.k.bias" in name:
            continue  # zero but for rounding: softmax does not see a shift of all scores
        assert (ours[name] - p.grad).abs().max() <= 1e-5 * p.grad.abs().max() + 1e-7, name


def test_a_loss_of_many_chunks_is_that_of_full_logits_to_a_millionth():
    """Values and both gradients, by the same kernels for the products (MKL's and oneDNN's sums of 3,008 are 2e-6 apart); another file has tensor
    parallelism's to 1e-5, half precision's is below."""
    torch.manual_seed(0)
    hidden, weight, vocab = torch.randn(1200, 64), torch.randn(3008, 64) * 0.2, 3000
    target, found = torch.randint(0, vocab, (1200,)), []
    target[::7] = IGNORE
    assert len(hidden) > 2 * loss_module.LOSS_CHUNK
    for whole in (False, True):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = F.cross_entropy(matmul.linear(h, w)[:, :vocab], target, ignore_index=IGNORE, reduction="sum") / 1000 if whole else \
            linear_cross_entropy(h, w, target, vocab, 1000)
        loss.backward()
        found.append((loss.detach(), h.grad, w.grad))
    for ours, full in zip(*found, strict=True):
        assert (ours - full).norm() <= 1e-6 * full.norm()



@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=[pytest.mark.full, pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")])])
def test_the_losss_part_for_a_compiler_is_the_eager_one(compiled, dtype):
    """As it is, and compiled: two whole chunks go through it, the rest does not."""
    torch.manual_seed(0)
    hidden, weight, target, found, calls = torch.randn(1200, 64), torch.randn(3008, 64) * 0.2, torch.randint(0, 3000, (1200,)), [], []
    target[::7] = IGNORE
    part = torch.compile(loss_module.softmax_gradient, dynamic=False) if compiled else loss_module.softmax_gradient
    for softmax in (None, lambda *args: calls.append(len(args[0])) or part(*args)):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = linear_cross_entropy(h, w, target, 3000, 1000, softmax=softmax)
        loss.backward()
        found.append((loss.detach(), h.grad, w.grad))
    assert calls == [512, 512]
    for eager, ours in zip(*found, strict=True):
        assert (ours - eager).norm() <= (1e-6 if dtype == torch.float32 else 1e-3) * eager.norm()


def gradients(shape, kinds, x):
    model = noisy(build(**shape)).train()
    for block, block_kind in zip(model.blocks, kinds):
        block.recompute = block_kind
    torch.manual_seed(3)
    loss = model(x, x, divisor=100)
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters()}}


@pytest.mark.parametrize("onednn", [True, False])
@pytest.mark.parametrize("worth", [0, 1 << 60])
@pytest.mark.parametrize("shape", [*SHAPES, "dropout"])
def test_what_is_computed_again_is_computed_to_the_same_bits(shape, worth, onednn, monkeypatch):
    """Activation checkpointing of every kind, and what products make again by themselves where it is large."""
    settings, x = {**SHAPES.get(shape, dict(dropout=0.2)), "n_embd": 64}, tokens(20, 32)
    monkeypatch.setattr(matmul, "ONEDNN", onednn and torch.backends.mkldnn.is_available())
    assert matmul.serves(torch.empty(20, 32, 64), torch.empty(64, 64), 64)
    monkeypatch.setattr(matmul, "WORTH", 1 << 60)
    expected = gradients(settings, ["none"] * 3, x)
    monkeypatch.setattr(matmul, "WORTH", worth)
    for kinds in (["none"] * 3, ["selective"] * 3, ["block"] * 3, ["block", "selective", "none"]):
        found = gradients(settings, kinds, x)
        assert all(torch.equal(found[name], g) for name, g in expected.items()), kinds


@pytest.mark.parametrize("kind", ["selective", "block"])
def test_computing_again_spares_the_last_product_and_selective_spares_attention(kind, monkeypatch):
    calls, attend, multiply = [], model_module.attend, matmul.multiply
    monkeypatch.setattr(model_module, "attend", lambda *a, **k: calls.append("attention") or attend(*a, **k))
    monkeypatch.setattr(matmul, "ONEDNN", torch.backends.mkldnn.is_available())
    monkeypatch.setattr(matmul, "multiply", lambda x, w, bias=None: calls.append(tuple(w.shape)) or multiply(x, w, bias))
    gradients(dict(n_embd=64, n_layer=1), [kind], tokens(20, 32))
    assert calls.count("attention") == {"selective": 1, "block": 2}[kind]
    if torch.backends.mkldnn.is_available():
        assert calls.count((256, 64)) == 2 + 1 and calls.count((64, 256)) == 1 + 1  # up: twice; both: the input's gradient of the other


def test_no_label_at_all_is_a_loss_of_zero_and_no_gradient():
    model = build()
    loss = model(tokens(2, 8), torch.full((2, 8), IGNORE))
    loss.backward()
    assert loss == 0 and not any(p.grad.any() for p in model.parameters())


def test_a_scaled_loss_has_scaled_gradients():
    hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(64, 8, requires_grad=True)
    target = torch.arange(6)
    plain = torch.autograd.grad(linear_cross_entropy(hidden, weight, target, 60), (hidden, weight))
    scaled = torch.autograd.grad(1024 * linear_cross_entropy(hidden, weight, target, 60), (hidden, weight))
    for a, b in zip(plain, scaled):
        assert torch.equal(a * 1024, b)


@pytest.mark.parametrize("dtype, bound", [(torch.bfloat16, 0.02), (torch.float16, 0.003)])
def test_half_precision_keeps_the_gradient_of_a_token_among_half_a_million(dtype, bound):
    torch.manual_seed(0)
    hidden, weight, target = torch.randn(64, 32), torch.randn(512, 32) * 0.3, torch.arange(64)
    scale, divisor = 65536.0, 524_288
    grads = []
    for on in (False, True):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        with torch.autocast("cpu", dtype, enabled=on):
            loss = linear_cross_entropy(h, w, target, 500, divisor)
        (loss * scale).backward()
        grads.append((h.grad, w.grad))
    for exact, half in zip(*grads):
        assert (exact - half).norm() < bound * exact.norm()


def test_evaluation_makes_no_gradient(monkeypatch):
    hidden, weight = torch.randn(8, 4), torch.randn(64, 4, requires_grad=True)
    monkeypatch.setattr(torch.Tensor, "exp_", lambda self: pytest.fail("a gradient is made"))
    with torch.no_grad():
        linear_cross_entropy(hidden, weight, torch.arange(8), 64)


def test_the_loss_never_holds_the_full_logits():
    n, c, v = 4096, 16, 8192
    hidden, weight, target = torch.randn(n, c, requires_grad=True), torch.randn(v, c, requires_grad=True), torch.zeros(n, dtype=torch.long)
    with torch.profiler.profile(profile_memory=True) as prof:
        linear_cross_entropy(hidden, weight, target, v).backward()
    largest = max(e.cpu_memory_usage for e in prof.events())
    assert largest < 0.3 * n * v * 4, f"{largest:,} bytes at once; the full logits would be {n * v * 4:,}"


# ------------------------------------------------------------------------------------------------- weights and shapes


def test_first_weights_are_a_function_of_seed_and_name_alone():
    a, b, other = (build(seed=s) for s in (3, 3, 4))
    deeper = build(seed=3, n_layer=5)
    for name, p in a.named_parameters():
        assert torch.equal(p, b.get_parameter(name))
        if p.dim() > 1:
            assert not torch.equal(p, other.get_parameter(name))
    assert torch.equal(a.blocks[0].attn.q.weight, deeper.blocks[0].attn.q.weight)
    assert not torch.equal(a.blocks[0].attn.q.weight, a.blocks[0].attn.k.weight)


def test_first_weights_are_those_of_the_gpt2_paper():
    model = build(n_embd=192, n_layer=8)
    assert abs(model.wte.weight.std() - 0.02) < 0.001 and abs(model.blocks[0].mlp.up.weight.std() - 0.02) < 0.001
    assert abs(model.blocks[3].attn.o.weight.std() - 0.02 / 4) < 0.0005  # 1 / sqrt(2 * 8 layers)
    assert not model.blocks[0].attn.q.bias.any() and (model.norm.weight == 1).all()
    x = tokens(4, 32)
    assert abs(model(x, tokens(4, 32, seed=1), divisor=128) - np.log(257)) < 0.1  # as good as guessing


def test_gpt2_has_as_many_parameters_as_gpt2():
    with torch.device("meta"):
        model = GPT(ModelConfig())
    assert sum(p.numel() for p in model.parameters()) - (50304 - 50257) * 768 == 124_439_808


@pytest.mark.parametrize("wrong, words", [
    (dict(n_embd=50), "n_embd=50 does not divide by n_head=4: n_head of 1, 2 or 5 would work"),
    (dict(n_kv_head=3), "1, 2 or 4 would work"), (dict(mlp="gleu"), "gelu, gelu_tanh, swiglu, relu2"),
    (dict(pos="rope", head_dim=7), "even head_dim"), (dict(dropout=1.0), "dropout=1.0"), (dict(n_layer=0), "n_layer=0"),
    (dict(n_head=0), "n_head=0"), (dict(rope_scaling=4.0), "pos=rope would work"),
    (dict(pos="rope", rope_scaling=0.5, rope_scaling_type="linear"), "at least 1"), (dict(pos="rope", rope_scaling_type="yarn"), "rope_scaling=4 would work"),
    (dict(pos="rope", rope_scaling=2.0, rope_scaling_type="ntk"), "llama3, linear, yarn"), (dict(pos="rope", rope_beta_slow=64.0), "rope_beta_slow=64.0"),
    (dict(pos="rope", rope_theta=1.0, rope_scaling=2.0, rope_scaling_type="yarn"), "above 1"), (dict(rope_attention_factor=0.0), "rope_attention_factor=0.0")])
def test_what_cannot_be_built_is_said_with_what_would_work(wrong, words):
    problems = ModelConfig(**{"block_size": 32, "vocab_size": 257, "n_layer": 3, "n_head": 4, "n_embd": 48, **wrong}).problems()
    assert words in problems[0]


# ---------------------------------------------------------------------------------------------------------- sampling


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("prompt, new", [(5, 20), (5, 60), (32, 3), (50, 10)])  # within the context, past it, beyond it from the start
def test_greedy_text_with_the_cache_equals_greedy_text_without(shape, prompt, new):
    model = noisy(build(**SHAPES[shape]))
    x = tokens(2, prompt)
    cached = torch.stack(list(generate(model, x, new, temperature=0)))
    plain = torch.stack(list(generate(model, x, new, temperature=0, use_cache=False)))
    assert cached.shape == (new, 2) and torch.equal(cached, plain)


def test_the_cache_is_really_used(monkeypatch):
    lengths = []
    forward = GPT.forward
    monkeypatch.setattr(GPT, "forward", lambda self, t, *a, **k: lengths.append(t.size(1)) or forward(self, t, *a, **k))
    list(generate(build(), tokens(1, 5), 10, temperature=0))
    assert lengths == [5] + [1] * 9


def test_ten_thousand_samples_never_leave_the_real_vocabulary():
    model = build(vocab_size=67)  # padded to 128: 48% of an untrained model's guesses would be padding
    picked = torch.cat([t for t in generate(model, tokens(2000, 4, 67), 5, temperature=1.5)])
    assert len(picked) == 10_000 and picked.max() == 66 and len(picked.unique()) == 67
    limited = torch.cat([t for t in generate(model, tokens(500, 4, 60), 4, vocab_size=60)])
    assert limited.max() < 60


def test_a_row_is_the_same_text_in_any_batch_and_another_under_another_seed():
    model = noisy(build())
    x = tokens(1, 6)
    alone = torch.stack(list(generate(model, x, 12, seed=5)))[:, 0]
    three = torch.stack(list(generate(model, x.expand(3, -1), 12, seed=5)))
    assert torch.equal(alone, three[:, 0]) and not torch.equal(three[:, 0], three[:, 1])
    assert not torch.equal(alone, torch.stack(list(generate(model, x, 12, seed=6)))[:, 0])


def test_picks_follow_the_distribution_and_its_cuts():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    even = (torch.arange(10_000) + 0.5) / 10_000
    counts = lambda **k: torch.bincount(pick(logits.expand(10_000, -1), even, **k), minlength=4) / 10_000
    assert torch.allclose(counts(), torch.tensor([0.5, 0.3, 0.15, 0.05]), atol=1e-3)
    assert torch.allclose(counts(top_k=2), torch.tensor([0.625, 0.375, 0, 0]), atol=1e-3)
    assert torch.allclose(counts(top_p=0.7), torch.tensor([0.625, 0.375, 0, 0]), atol=1e-3)
    assert torch.allclose(counts(top_p=0.1), torch.tensor([1.0, 0, 0, 0]))
    assert torch.equal(counts(top_k=99), counts())
    assert pick(logits, torch.tensor([1.0 - 1e-16], dtype=torch.float64))[0] == 3
    sharp = counts(temperature=0.5)
    assert torch.allclose(sharp, torch.tensor([0.25, 0.09, 0.0225, 0.0025]) / 0.365, atol=1e-3)


def test_a_stop_token_ends_a_row_and_then_the_text():
    model = build()
    greedy = torch.stack(list(generate(noisy(model), tokens(1, 5), 10, temperature=0)))[:, 0]
    stop = int(greedy[4])
    stopped = torch.stack(list(generate(model, tokens(1, 5), 10, temperature=0, stop_token=stop)))[:, 0]
    assert torch.equal(stopped, greedy[:list(greedy).index(stop) + 1])


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_that_follow_a_cache_in_parts_have_the_logits_of_the_whole(shape):
    model, x = noisy(build(**SHAPES[shape])), tokens(2, 20)
    with torch.no_grad():
        expected = model(x)
        cache, parts = KVCache(model, 2, 8, torch.float32, "cpu"), []
        for a, b in ((0, 6), (6, 7), (7, 15), (15, 20)):
            cache.grow(32 if b > 8 else 8)
            parts.append(model(x[:, a:b], cache=cache))
        assert torch.allclose(torch.cat(parts, dim=1), expected, atol=1e-4)
        cache.length = 9  # cut back, and other tokens from there on
        y = torch.cat((x[:, :9], tokens(2, 6, seed=3)), dim=1)
        assert torch.allclose(model(y[:, 9:], cache=cache), model(y)[:, 9:], atol=1e-4) and cache.length == 15


@pytest.mark.parametrize("options", [dict(temperature=0), dict(temperature=1.0, top_k=50), dict(top_p=0.9, stop_token=[3, 9, 77, 100])])
@pytest.mark.parametrize("shape", ["gpt2", "qwen3"])
def test_texts_made_side_by_side_are_those_made_alone(shape, options):
    model = noisy(build(**SHAPES[shape]))
    prompts = [tokens(1, n, seed=n)[0].tolist() for n in (3, 20, 31, 40, 5, 1)]  # some fill the context, one is longer
    for new in (1, 14):
        found = {(i, j): ids for i, j, ids in complete(model, prompts, new, batch_size=4, samples=2, seed=7, **options)}
        assert sorted(found) == [(i, j) for i in range(6) for j in range(2)]
        for i, prompt in enumerate(prompts):
            alone = torch.stack(list(generate(model, torch.tensor([prompt] * 2), new, seed=7, **options)), dim=1)
            for j, row in enumerate(alone.tolist()):
                ends = [n for n, token in enumerate(row) if token in options.get("stop_token", [])]
                assert found[i, j] == row[:ends[0] + 1 if ends else None], (prompt, j)


def test_no_row_of_a_batch_is_left_idle_while_prompts_wait(monkeypatch):
    rows, forward = [], GPT.forward
    monkeypatch.setattr(GPT, "forward", lambda self, t, *a, **k: rows.append(t.shape) or forward(self, t, *a, **k))
    prompts = [[1] * n for n in (3, 5, 4, 6)]
    list(complete(noisy(build()), prompts, 5, batch_size=2, temperature=0))
    assert sum(T == 1 for _, T in rows) == 8 and all(B == 2 for B, T in rows if T == 1)
    assert [shape for shape in rows if shape[1] > 1] == [(1, 3), (1, 5), (1, 4), (1, 6)]  # nothing is padded


def test_packed_weights_give_the_same_logits_and_never_reach_a_gradient():
    for shape in SHAPES.values():
        model, x = noisy(build(**shape)), tokens(2, 9)
        with torch.no_grad():
            expected = model(x)
            with packed_weights(model), packed_weights(model):
                assert model.packed_head is not None and model.blocks[0].attn.q.packed is not None
                assert torch.allclose(model(x), expected, atol=1e-4)
        with packed_weights(model):
            model(x, tokens(2, 9, seed=1)).backward()
        assert model.blocks[0].mlp.up.weight.grad.any() and model.packed_head is None and model.blocks[0].attn.q.packed is None


def test_greedy_text_in_bfloat16_is_that_of_float32_nearly_always():
    for shape in SHAPES.values():
        model, x = noisy(build(**shape)), tokens(4, 12)
        with torch.no_grad(), packed_weights(model):
            expected = model(x)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), packed_weights(model):
            found = model(x)
        top = expected.topk(2).values  # where two tokens are nearly even, either is right
        clear = top[..., 0] - top[..., 1] > 0.02 * expected.std()
        assert found.dtype == torch.float32 and (found.argmax(-1) == expected.argmax(-1))[clear].float().mean() > 0.95 and clear.float().mean() > 0.8
        assert (found - expected).abs().max() < 0.1 * expected.std()


def test_weights_that_are_not_finite_stop_a_sample():
    model = build()
    with torch.no_grad():
        model.norm.weight[0] = float("nan")
    with pytest.raises(FloatingPointError):
        list(generate(model, tokens(1, 5), 3))


def test_generating_leaves_the_mode_of_the_model_alone():
    model = build(dropout=0.5).train()
    a, b = (torch.stack(list(generate(model, tokens(1, 5), 5, temperature=0))) for _ in range(2))
    assert torch.equal(a, b) and model.training
    assert KVCache(model, 1, 8, torch.float32, "cpu").store.shape == (3, 2, 1, 4, 8, 12)


def test_plain_attention_takes_no_kernel_and_gives_the_same():
    """A switch to tell whether a fused kernel is at fault where a run diverges (nanoGPT I167, I215)."""
    from engine.attention import attend
    from engine.processes import use_attention

    q, k, v = torch.randn(3, 2, 3, 16, 8)
    found = {}
    try:
        for attention in ("auto", "plain"):
            use_attention(attention)
            with torch.profiler.profile() as seen:
                found[attention] = attend(q, k, v)
            kernels = {e.key for e in seen.key_averages()}
            assert ("aten::_scaled_dot_product_flash_attention_for_cpu" in kernels) == (attention == "auto")
    finally:
        use_attention("auto")
    assert torch.allclose(found["auto"], found["plain"], atol=1e-6)
