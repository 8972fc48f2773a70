"""The order of the data: which window of tokens is the i-th sample of a run.

A pure function of (seed, epoch, position): no generator state to save, no index array that grows with the corpus,
nothing that depends on how many processes read. Each epoch is a keyed permutation of all windows, made by a Feistel
network over the smallest even number of bits that holds them, walked along its cycle until it lands inside
(Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
"""

import hashlib

import numpy as np
import torch

from engine.attention import Documents

IGNORE = -1  # a target that carries no loss
ROUNDS = 6  # four make a Feistel network look random (Luby and Rackoff, 1988); two more, since its halves are small here


def derive_seed(*what) -> int:
    """A 63-bit integer that is a fixed function of what it is for, the same on every machine (hash() is salted)."""
    digest = hashlib.blake2b("/".join(map(str, what)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _mix(x):
    """splitmix64's finaliser: every input bit reaches every output bit. uint64 array -> uint64 array."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(positions: np.ndarray, n: int, key: str) -> np.ndarray:
    """Where a keyed permutation of range(n) sends `positions` (any int array with values in [0, n)); int64 array."""
    half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    half, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    round_keys = [np.uint64(derive_seed(key, r)) for r in range(ROUNDS)]

    def encrypt(x):
        left, right = x >> half, x & mask
        for k in round_keys:
            left, right = right, left ^ (_mix(right ^ k) & mask)
        return (left << half) | right

    x = encrypt(np.asarray(positions, dtype=np.uint64))
    while (outside := x >= np.uint64(n)).any():  # at most 4 n values, so under 4 steps a position on average
        x[outside] = encrypt(x[outside])
    return x.astype(np.int64)


class SampleOrder:
    """Samples 0, 1, 2, ... of a run, without end: every window once an epoch, each epoch in an order of its own."""

    def __init__(self, n_windows, seed):
        self.n_windows, self.seed = n_windows, seed

    def windows(self, start: int, count: int) -> np.ndarray:
        """The windows of samples start ... start+count-1, an int64 array (count,). It may reach into the next epoch."""
        samples = np.arange(start, start + count)
        epochs, positions = samples // self.n_windows, samples % self.n_windows
        out = np.empty(count, dtype=np.int64)
        for epoch in np.unique(epochs):
            inside = epochs == epoch
            out[inside] = permute(positions[inside], self.n_windows, f"order/{self.seed}/{epoch}")
        return out


def count_windows(n_tokens: int, block_size: int) -> int:
    """Consecutive windows of block_size inputs in n_tokens tokens; each also needs the token after it as its last target."""
    return max(0, (n_tokens - 1) // block_size)


class WindowReader:
    """Cuts the windows of a TokenDataset and hands them out in the run's order, or in file order for evaluation.

    What reads samples has n_windows, epoch (samples until each window was seen once), fingerprint (of the tokens), description (a line),
    which(), labels() and batch(). With eot_id, the token that ends a document, attention is to stay inside documents.
    """

    def __init__(self, dataset, block_size, seed=None, eot_id=None):
        self.dataset, self.block_size, self.fingerprint = dataset, block_size, dataset.fingerprint
        self.eot_id, self.with_documents = eot_id, eot_id is not None
        self.n_windows = self.epoch = count_windows(dataset.n_tokens, block_size)
        self.order = None if seed is None else SampleOrder(self.n_windows, seed)
        self.description = dataset.description

    def which(self, start: int, count: int) -> list[int]:
        """The windows that are samples start ... start+count-1, integers."""
        return list(range(start, start + count)) if self.order is None else self.order.windows(start, count).tolist()

    def labels(self, start: int, count: int) -> int:
        """How many tokens of samples start ... start+count-1 bear a label. Every rank knows it of all, without a word to the others."""
        return count * self.block_size

    def batch(self, start: int, count: int, rows: int | None = None) -> tuple[torch.Tensor, torch.Tensor, Documents | None]:
        """Samples start ... start+count-1: inputs and targets, int64 tensors (count, block_size) each, and their Documents or None.

        With `rows`, filled up to so many rows that bear no labels.
        """
        found = [self.row(w) for w in self.which(start, count)]
        return collate(found, self.block_size, rows or count, self.with_documents)

    def row(self, window):
        """(inputs (T,), targets (T,), [length of each document]) of a window."""
        tokens = self.dataset.read(window * self.block_size, self.block_size + 1)
        if not self.with_documents:
            return tokens[:-1], tokens[1:], [self.block_size]
        borders = np.flatnonzero(tokens[:-1] == self.eot_id) + 1  # the token that ends a document is its last
        return tokens[:-1], tokens[1:], [n for n in np.diff(borders, prepend=0, append=self.block_size).tolist() if n]


def collate(found, block_size, rows, with_documents, padding=0):
    """Rows as WindowReader.row() and RecordReader.row() give them, shorter ones padded, as a batch of `rows` rows: inputs and targets
    (rows, block_size), IGNORE where there is no label, and Documents, or None without them."""
    x = np.full((rows, block_size), padding, np.int64)
    y = np.full((rows, block_size), IGNORE, np.int64)
    lengths, is_padding = [], []
    for r in range(rows):
        inputs, targets, parts = found[r] if r < len(found) else ((), (), [])
        x[r, :len(inputs)], y[r, :len(inputs)] = inputs, targets
        left = [block_size - len(inputs)] if len(inputs) < block_size else []
        lengths += parts + left
        is_padding += [False] * len(parts) + [True] * len(left)
    documents = None
    if with_documents:
        labelled = np.flatnonzero(y != IGNORE)
        documents = Documents(lengths, rows, is_padding, torch.from_numpy(labelled) if len(labelled) < y.size else None)
    return torch.from_numpy(x), torch.from_numpy(y), documents
