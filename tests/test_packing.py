"""Records that share a row do not see each other, and a row holds as many as fit."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from conftest import made_up_records, write_records
from data.order import IGNORE, WindowReader
from data.packing import MixedReader, RecordReader, best_fit
from data.shards import TokenDataset
from engine import attention
from engine.attention import Documents
from engine.errors import UserError
from engine.recompute import KINDS
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
        from torch.nn.attention.flex_attention import flex_attention  # its backward does not run on a CPU

        documents.mask, documents.flex = attention.block_mask(documents.ids(), compiled=False), flex_attention
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
def test_another_record_changes_no_bit_of_the_others(shape, kind):
    model, found = noisy(build(**{**SHAPES[shape], "head_dim": 16})), records(LENGTHS)  # FlexAttention wants 16 or more

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
    for kind in KINDS:
        for block in model.blocks:
            block.recompute = kind
        model.zero_grad()
        torch.manual_seed(3)
        model(x, y, documents=documents).backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
    for name, g in gradients[0].items():
        assert torch.equal(g, gradients[1][name]) and torch.equal(g, gradients[2][name]) and g.isfinite().all(), name


@pytest.mark.parametrize("shape", ["gpt2", "llama"])  # a head of its own has no other gradient
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


# ------------------------------------------------------------------------------------------------------------- rows of records


@pytest.mark.parametrize("room, longest", [(64, 64), (1000, 1000), (50, 9), (1, 1)])
def test_rows_are_full_and_never_too_full(room, longest):
    lengths = np.random.default_rng(room).integers(1, longest + 1, 3000)
    rows = best_fit(lengths, room)
    full = np.bincount(rows, weights=lengths)
    assert full.min() > 0 and full.max() <= room and np.array_equal(rows, best_fit(lengths, room))
    assert len(full) <= 1.02 * lengths.sum() / room + 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    lengths = np.random.default_rng(5).integers(2, 34, 300)  # over several shards; some fill a row of 32
    return write_records(tmp_path_factory.mktemp("records"), train=made_up_records(lengths), val=made_up_records([9, 33], seed=1))


def answers(reader, start, count):
    """The labelled tokens of each document in a batch, as a sorted list of tuples."""
    x, y, documents = reader.batch(start, count)
    assert documents.rows == count and x.shape == y.shape == (count, 32) and documents.lengths.sum() == count * 32
    assert np.array_equal(documents.labels.numpy(), np.flatnonzero(y.flatten() != IGNORE))
    ends = np.cumsum(documents.lengths)
    assert set(range(32, count * 32 + 1, 32)) <= set(ends.tolist())  # none crosses the end of a row
    found = []
    for end, length, padding in zip(ends, documents.lengths, documents.padding):
        inputs, part = x.flatten()[end - length:end], y.flatten()[end - length:end]
        assert not padding or not inputs.any() and (part == IGNORE).all()
        known = part[:-1] != IGNORE
        assert torch.equal(part[:-1][known], inputs[1:][known])  # what is learnt is the next token of the same record
        found += [] if padding else [tuple(part[part != IGNORE].tolist())]
    return sorted(found)


@pytest.mark.parametrize("pack", [True, False])
def test_an_epoch_has_every_records_labels_once_packed_or_not(folder, pack):
    dataset = TokenDataset(folder, "train")
    reader = RecordReader(dataset, 32, pack, seed=3)
    lengths = np.random.default_rng(5).integers(2, 34, 300)
    expected = sorted(tuple(ids[learn].tolist()) for ids, learn in made_up_records(lengths))
    n = reader.n_windows
    assert answers(reader, 0, n) == expected == answers(reader, n, n)
    assert (n < 1.1 * (lengths - 1).sum() / 32) if pack else n == 300
    assert reader.labels(0, n) == sum(map(len, expected))
    assert not torch.equal(reader.batch(0, n)[0], reader.batch(n, n)[0])  # another order
    for start, count in ((0, 1), (5, 7), (n - 3, 9)):
        assert reader.labels(start, count) == (reader.batch(start, count)[1] != IGNORE).sum()
        parts = [reader.batch(i, 1)[0] for i in range(start, start + count)]
        assert torch.equal(torch.cat(parts), reader.batch(start, count)[0])


def test_rows_that_fill_a_batch_up_bear_no_labels(folder):
    reader = RecordReader(TokenDataset(folder, "train"), 32)
    assert reader.which(2, 3) == [2, 3, 4]  # without a seed in the order of rows
    x, y, documents = reader.batch(2, 3, rows=5)
    assert x.shape == (5, 32) and (y[3:] == IGNORE).all() and documents.lengths.sum() == 160 and documents.padding[-2:].all()
    x, y, documents = reader.batch(0, 0, rows=2)
    assert (y == IGNORE).all() and len(documents.labels) == 0


def test_a_record_longer_than_a_row_and_records_without_labels_are_told(folder, tmp_path):
    dataset = TokenDataset(folder, "train")
    with pytest.raises(UserError, match="record [0-9]+ of the train split .* has 33 tokens, block_size=16 takes 17: .*--block_size=16, or block_size=32 would"):
        RecordReader(dataset, 16)
    nothing = write_records(tmp_path / "none", train=[([1, 2, 3], [True, False, False])] * 4)  # nothing predicts a first token
    with pytest.raises(UserError, match="no token with a label"):
        RecordReader(TokenDataset(nothing, "train"), 32)
    some = write_records(tmp_path / "some", train=[([1, 2, 3], [False] * 3), ([7], [True]), ([4, 5, 6], [False, False, True])])
    reader = RecordReader(TokenDataset(some, "train"), 32, pack=False)
    assert reader.n_windows == 2 and [reader.labels(i, 1) for i in range(2)] == [0, 1]


@pytest.mark.parametrize("pack", [True, False])
def test_the_question_asked_is_the_first_that_has_an_answer(tmp_path, pack):
    unlabelled, asked = ([1, 2, 3], [False] * 3), ([4, 5, 6, 7, 8], [False, False, True, True, False])
    for name, first in (("without", [unlabelled, unlabelled]), ("with", [])):
        folder = write_records(tmp_path / name, val=[*first, asked, ([9, 9], [False, True])])
        assert RecordReader(TokenDataset(folder, "val"), 32, pack).question() == ([4, 5], 7)


@pytest.mark.parametrize("fraction", [0.1, 0.25, 1 / 3, 0.9])
def test_replayed_text_is_spread_evenly_and_every_part_is_what_the_whole_says(folder, data, fraction):
    rows = RecordReader(TokenDataset(folder, "train"), 32, seed=1)
    text = WindowReader(TokenDataset(data, "train"), 32, seed=1)
    reader = MixedReader(rows, text, fraction)
    n = 400
    which = reader.which(0, n)
    replayed = [isinstance(w, str) for w in which]
    for i in range(n):
        assert abs(sum(replayed[:i + 1]) - (i + 1) * fraction) < 1.001
    assert [w for w in which if not isinstance(w, str)] == rows.which(0, n - sum(replayed))
    assert [w for w in which if isinstance(w, str)] == [f"replay {w}" for w in text.which(0, sum(replayed))]
    x, y, documents = reader.batch(0, n)
    for i in (0, 17, 200, n - 1):
        a, b, d = reader.batch(i, 1)
        assert torch.equal(a[0], x[i]) and torch.equal(b[0], y[i]) and reader.labels(i, 1) == (b != IGNORE).sum() and reader.which(i, 1) == [which[i]]
        assert not replayed[i] or (b != IGNORE).all() and d.labels is None and d.lengths.tolist() == [32]
    assert reader.labels(13, 100) == (y[13:113] != IGNORE).sum()
    assert reader.epoch == pytest.approx(rows.n_windows / (1 - fraction)) and reader.fingerprint != rows.fingerprint


def test_documents_of_pretraining_end_with_the_end_of_text_token(tmp_path):
    text = np.arange(65) % 200
    text[[4, 5, 31, 40, 64]] = 256
    folder = write_records(tmp_path, train=[(text, [True] * 65)])
    reader = WindowReader(TokenDataset(folder, "train"), 32, eot_id=256)
    x, y, documents = reader.batch(0, 2)
    assert documents.lengths.tolist() == [5, 1, 26, 9, 23] and not documents.padding.any() and documents.labels is None
    assert documents.positions[0, :8].tolist() == [0, 1, 2, 3, 4, 0, 0, 1]
    assert torch.equal(x, WindowReader(TokenDataset(folder, "train"), 32).batch(0, 2)[0]) and y[0, 3] == 256
    assert WindowReader(TokenDataset(folder, "train"), 32).batch(0, 2)[2] is None
