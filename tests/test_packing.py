"""Records that share a row do not see each other, and a row holds as many as fit."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from engine import attention
from engine.attention import Documents
from model import IGNORE
from test_model import SHAPES, build, noisy, tokens

pytestmark = pytest.mark.quick


# ------------------------------------------------------------------------------------------------- attention inside documents


def records(lengths, vocab=257, seed=0):
    """[(inputs (n,), targets (n,), the first two of three positions without a label)]"""
    rng = np.random.default_rng(seed)
    found = []
    for n in lengths:
        ids = torch.from_numpy(rng.integers(0, vocab, n + 1))
        targets = ids[1:].clone()
        targets[np.arange(n) % 3 < 2] = IGNORE
        found.append((ids[:-1], targets))
    return found


ROWS = [[0, 1, 2], [3], [4, 5, 6, 7]]  # which records share a row of 32
LENGTHS = [5, 20, 3, 30, 1, 9, 9, 9]


def packed(found, rows=ROWS, T=32, labels=True):
    x, y = torch.zeros(len(rows), T, dtype=torch.int64), torch.full((len(rows), T), IGNORE)
    lengths, padding = [], []
    for r, row in enumerate(rows):
        at = 0
        for i in row:
            n = len(found[i][0])
            x[r, at:at + n], y[r, at:at + n] = found[i]
            lengths, padding, at = [*lengths, n], [*padding, False], at + n
        if at < T:
            lengths, padding = [*lengths, T - at], [*padding, True]
    return x, y, Documents(lengths, len(rows), padding, torch.from_numpy(np.flatnonzero(y.flatten() != IGNORE)) if labels else None)


def masked(documents, kind):
    """The same documents as another device would have them; FlexAttention's mask function, not compiled."""
    if kind == "dense":
        documents.mask = attention.dense_mask(documents.ids())
    if kind == "blocks":
        documents.mask = attention.block_mask(documents.ids(), compiled=False)
    return documents


@pytest.mark.parametrize("kind", ["pieces", "dense"])
@pytest.mark.parametrize("shape", ["gpt2", "llama", "qwen3"])
def test_packed_records_have_the_losses_and_the_gradients_of_records_alone(shape, kind):
    model, found = noisy(build(**SHAPES[shape])), records(LENGTHS)
    losses, total = [], sum((y != IGNORE).sum() for _, y in found)
    for x, y in found:
        losses.append(model(x[None], y[None], divisor=total))
        losses[-1].backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters()}
    for labels in (True, False):
        model.zero_grad()
        x, y, documents = packed(found, labels=labels)
        with torch.no_grad():
            logits = model(x, documents=masked(documents, kind))
        at = 0
        for row in ROWS:
            for i in row:
                r, start = divmod(at, 32)
                n = len(found[i][0])
                assert torch.allclose(logits[r, start:start + n], model(found[i][0][None])[0], atol=1e-4), i
                one = F.cross_entropy(logits[r, start:start + n], found[i][1], ignore_index=IGNORE, reduction="sum") / total
                assert one.item() == pytest.approx(losses[i].item(), rel=1e-5), i
                at += n
            at = -(-at // 32) * 32
        loss = model(x, y, divisor=total, documents=masked(documents, kind))
        assert loss.item() == pytest.approx(sum(losses).item(), rel=1e-5)
        loss.backward()
        for name, p in model.named_parameters():
            assert (p.grad - expected[name]).abs().max() <= 1e-5 * expected[name].abs().max() + 1e-7, name


@pytest.mark.parametrize("kind", ["pieces", "dense", "blocks"])
@pytest.mark.parametrize("shape", ["gpt2", "llama", "qwen3"])
def test_another_record_changes_no_bit_of_the_others(shape, kind, monkeypatch):
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(attention, "flex_attention", lambda: flex_attention)  # not compiled; its backward does not run on a CPU
    model, found = noisy(build(**{**SHAPES[shape], "head_dim": 16})), records(LENGTHS)  # and it wants 16 or more

    def logits(kind):
        x, _, documents = packed(found)
        with torch.no_grad():
            return model(x, documents=masked(documents, kind))

    before, is_record = logits(kind), ~padding(packed(found)[2])
    assert torch.allclose(before[is_record], logits("pieces")[is_record], atol=1e-4)
    for i in (1, 5):
        found[i] = (tokens(1, LENGTHS[i], seed=50 + i)[0], found[i][1])
    after = logits(kind)
    changed = torch.zeros(3, 32, dtype=torch.bool)
    changed[0, 5:25] = changed[2, 1:10] = True
    assert torch.equal(before[is_record & ~changed], after[is_record & ~changed])
    assert not torch.allclose(before[changed], after[changed], atol=1e-2)


def padding(documents):
    return torch.from_numpy(np.repeat(documents.padding, documents.lengths)).view(documents.rows, -1)


def test_dropout_and_computing_again_are_as_without_documents():
    model, (x, y, documents) = noisy(build(dropout=0.2)).train(), packed(records(LENGTHS))
    gradients = []
    for model.recompute in (False, True):
        model.zero_grad()
        torch.manual_seed(3)
        model(x, y, documents=documents).backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
    for name, g in gradients[0].items():
        assert torch.allclose(g, gradients[1][name], rtol=1e-6, atol=1e-6) and g.isfinite().all(), name


@pytest.mark.parametrize("shape", ["gpt2", "qwen3"])
def test_a_batch_without_a_label_is_a_loss_of_zero_and_gradients_of_zero(shape):
    model, found = build(**SHAPES[shape]), [(x, torch.full_like(y, IGNORE)) for x, y in records(LENGTHS)]
    x, y, documents = packed(found)
    assert len(documents.labels) == 0
    loss = model(x, y, documents=documents)
    loss.backward()
    assert loss == 0 and all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_one_document_a_row_is_no_documents_at_all():
    model, x, y = noisy(build()), tokens(3, 32), tokens(3, 32, seed=1)
    documents = Documents([32] * 3, 3)
    assert documents.runs == [(3, 32, False)]
    assert torch.equal(model(x, y), model(x, y, documents=documents))
