"""The order of the data: which window of tokens is the i-th sample of a run.

A pure function of (seed, epoch, position): no generator state to save, no index array that grows with the corpus,
nothing that depends on how many processes read. Each epoch is a keyed permutation of all windows, made by a Feistel
network over the smallest even number of bits that holds them, walked along its cycle until it lands inside
(Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
"""

import hashlib

import numpy as np
import torch

ROUNDS = 6  # four make a Feistel network look random (Luby and Rackoff, 1988); two more, since its halves are small here


def derive_seed(*what):
    """A 63-bit integer that is a fixed function of what it is for, the same on every machine (hash() is salted)."""
    digest = hashlib.blake2b("/".join(map(str, what)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _mix(x):
    """splitmix64's finaliser: every input bit reaches every output bit. uint64 array -> uint64 array."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(positions, n, key):
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

    def windows(self, start, count):
        """The windows of samples start ... start+count-1, an int64 array (count,). It may reach into the next epoch."""
        samples = np.arange(start, start + count)
        epochs, positions = samples // self.n_windows, samples % self.n_windows
        out = np.empty(count, dtype=np.int64)
        for epoch in np.unique(epochs):
            inside = epochs == epoch
            out[inside] = permute(positions[inside], self.n_windows, f"order/{self.seed}/{epoch}")
        return out


def count_windows(n_tokens, block_size):
    """Consecutive windows of block_size inputs in n_tokens tokens; each also needs the token after it as its last target."""
    return max(0, (n_tokens - 1) // block_size)


class WindowReader:
    """Cuts the windows of a TokenDataset and hands them out in the run's order, or in file order for evaluation."""

    def __init__(self, dataset, block_size, seed=None):
        self.dataset, self.block_size = dataset, block_size
        self.n_windows = count_windows(dataset.n_tokens, block_size)
        self.order = None if seed is None else SampleOrder(self.n_windows, seed)

    def batch(self, start, count):
        """Samples start ... start+count-1: inputs and targets, int64 tensors (count, block_size) each."""
        windows = range(start, start + count) if self.order is None else self.order.windows(start, count)
        if not count:
            return (torch.empty(0, self.block_size, dtype=torch.int64),) * 2
        rows = np.stack([self.dataset.read(int(w) * self.block_size, self.block_size + 1) for w in windows])
        tokens = torch.from_numpy(rows)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
