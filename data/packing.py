"""Records for SFT as rows of a batch: several a row, or one; each seen by itself alone.

A record of n tokens takes n - 1 positions: all but its last are inputs, all but its first are targets, those with a label at least. Which
records share a row follows from their lengths, and the order of rows from (seed, epoch, position) as that of windows does: nothing
here has a state to save.
"""

import hashlib
from fractions import Fraction

import numpy as np

from data.order import IGNORE, SampleOrder, WindowReader, collate
from data.shards import BEGIN, LABEL, SCAN_STEP
from engine.errors import UserError


def best_fit(lengths: np.ndarray, room: int) -> np.ndarray:
    """The row of each record, an int64 array: the longest first, each into the fullest row that it fits in (best-fit decreasing).

    lengths: (n,) integers from 1 to room. Some 2 s for a million records.
    """
    row_of = np.empty(len(lengths), np.int64)
    rows_with = [[] for _ in range(room + 1)]  # by the room left in them
    some, rows = 0, 0  # bit r of `some`: there is a row with room for r
    order = np.argsort(-np.asarray(lengths), kind="stable")
    for i, n in zip(order.tolist(), lengths[order].tolist()):
        fitting = some >> n
        if fitting:
            left = n + (fitting & -fitting).bit_length() - 1  # the lowest bit: the least room that is enough
            row = rows_with[left].pop()
            if not rows_with[left]:
                some ^= 1 << left
        else:
            left, row, rows = room, rows, rows + 1
        row_of[i] = row
        if left > n:
            if not rows_with[left - n]:
                some |= 1 << left - n
            rows_with[left - n].append(row)
    return row_of


class RecordReader(WindowReader):
    """The records of a TokenDataset with marks as rows of block_size, in the run's order, or in the order of rows for evaluation. A reader
    of samples whose windows are rows.

    pack: as many records a row as best_fit finds room for; else one. UserError where a record is longer than a row, or none has a label.
    """

    def __init__(self, dataset, block_size, pack=True, seed=None):
        self.dataset, self.block_size, self.fingerprint, self.with_documents = dataset, block_size, dataset.fingerprint, True
        self.starts, self.lengths, labels = find_records(dataset)
        where = f"the {dataset.split} split of {dataset.path}"
        if (longest := self.lengths.max(initial=0)) > block_size:
            raise UserError(f"record {self.lengths.argmax() + 1} of {where} has {longest + 1:,} tokens, block_size={block_size} takes {block_size + 1:,}: prepare "
                            f"the records with --block_size={block_size}, or block_size={longest} would work")
        if not labels.sum():
            raise UserError(f"{where} has no token with a label, so there is nothing to learn: look at report.json there, and prepare the records again")
        used = np.flatnonzero(self.lengths)  # a record of one token has nothing to predict
        rows = best_fit(self.lengths[used], block_size) if pack else np.arange(len(used))
        order = np.argsort(rows, kind="stable")  # within a row as in the file
        self.by_row, self.ends = used[order], np.cumsum(np.bincount(rows))
        self.row_labels = np.add.reduceat(labels[self.by_row], np.concatenate(([0], self.ends[:-1])))
        self.n_windows = self.epoch = len(self.ends)
        self.order, self.kept = None if seed is None else SampleOrder(self.n_windows, seed), (0, [])
        positions = int(self.lengths.sum())
        self.description = (f"{dataset.description}; {len(self.lengths):,} records in {self.n_windows:,} rows of {block_size} "
                            f"({positions / (self.n_windows * block_size):.0%} full), {labels.sum() / positions:.0%} of their tokens bear labels")

    def which(self, start, count):
        first, kept = self.kept
        return kept[start - first:][:count] if first <= start and start + count <= first + len(kept) else super().which(start, count)

    def labels(self, start, count):
        self.kept = start, super().which(start, count)  # of an update, whose micro-batches come next
        return int(self.row_labels[self.kept[1]].sum())

    def row(self, row):
        """(inputs, targets, [length of each record]) of a row, without its padding."""
        inputs, targets, lengths = [], [], []
        for record in self.by_row[self.ends[row - 1] if row else 0:self.ends[row]]:
            start, n = int(self.starts[record]), int(self.lengths[record])
            ids, marks = self.dataset.read(start, n + 1), self.dataset.read_marks(start, n + 1)
            inputs.append(ids[:-1])
            targets.append(np.where(marks[1:] & LABEL, ids[1:], IGNORE))
            lengths.append(n)
        return np.concatenate(inputs), np.concatenate(targets), lengths

    def question(self) -> tuple[list[int], int]:
        """(ids before the first answer of the first record that has one, the id that ends its last answer)."""
        row = next(row for i in range(self.n_windows) for row in self.which(i, 1) if self.row_labels[row])
        inputs, targets, lengths = self.row(row)
        labelled = np.flatnonzero(targets != IGNORE)
        ends = np.cumsum(lengths)
        record = int(np.searchsorted(ends, labelled[0], side="right"))
        start, stop = ends[record] - lengths[record], ends[record]
        return inputs[start:labelled[0] + 1].tolist(), int(targets[labelled[labelled < stop][-1]])


def find_records(dataset):
    """(where each record starts, the positions it takes, its labels) of a TokenDataset with marks; int64, int64 and int64 arrays."""
    starts, labels = [], []
    for at in range(0, dataset.n_tokens, SCAN_STEP):
        marks = dataset.read_marks(at, min(SCAN_STEP, dataset.n_tokens - at))
        starts.append(at + np.flatnonzero(marks & BEGIN))
        labels.append(at + np.flatnonzero((marks & LABEL) & ~((marks & BEGIN) >> 1)))  # nothing predicts a record's first token
    starts, labels = np.concatenate(starts), np.concatenate(labels)
    if not len(starts) or starts[0]:
        raise UserError(f"the marks of {dataset.path} {dataset.split} do not begin with a record: copy or prepare the data again")
    counts = np.diff(np.searchsorted(labels, np.append(starts, dataset.n_tokens)))
    return starts, np.diff(starts, append=dataset.n_tokens) - 1, counts


class MixedReader:
    """Records with general text between them, against forgetting: sample i is a window of `replay` where floor((i + 1) f) > floor(i f),
    f being the fraction, else the records' next row. All of a window's tokens bear labels."""

    def __init__(self, records, replay, fraction):
        self.records, self.replay, self.block_size, self.dataset = records, replay, records.block_size, records.dataset
        self.fraction = Fraction(fraction).limit_denominator(1_000_000)  # in integers: no sample of a long run is rounded to the other side
        self.n_windows = records.n_windows
        self.epoch = records.n_windows / (1 - fraction)
        self.fingerprint = hashlib.sha256(f"{records.fingerprint}/{replay.fingerprint}".encode()).hexdigest()
        self.description = f"{records.description}\nreplay: {fraction:.1%} of the samples, {replay.description}"

    def replayed(self, count):
        """How many of the first `count` samples are windows of the replayed text."""
        return count * self.fraction.numerator // self.fraction.denominator

    def parts(self, start, count):
        """(first, number) of the records' rows, and of the replayed windows, among the samples."""
        first, behind = self.replayed(start), self.replayed(start + count)
        return (start - first, count - (behind - first)), (first, behind - first)

    def labels(self, start, count):
        rows, windows = self.parts(start, count)
        return self.records.labels(*rows) + self.replay.labels(*windows)

    def which(self, start, count):
        """The records' rows, integers, and the replayed windows, texts, among the samples."""
        return self.interleaved(start, count, self.records.which, lambda *part: [f"replay {w}" for w in self.replay.which(*part)])

    def batch(self, start, count, rows=None):
        found = self.interleaved(start, count, lambda *part: [self.records.row(w) for w in self.records.which(*part)],
                                 lambda *part: [self.replay.row(w) for w in self.replay.which(*part)])
        return collate(found, self.block_size, rows or count, with_documents=True)

    def interleaved(self, start, count, of_records, of_replay):
        rows, windows = self.parts(start, count)
        rows, windows = iter(of_records(*rows)), iter(of_replay(*windows))
        return [next(windows if self.replayed(i + 1) > self.replayed(i) else rows) for i in range(start, start + count)]
