"""Tokens a second of generate() beside transformers' generate and nanoGPT's sample.py loop, and the share that this is of what
memory can give.

    python -m tests.bench.generate --peer PATH_TO_NANOGPT [--repeats 7] [--only 1,8] [--new_tokens 256]

GPT-2 124M shapes with random weights, a prompt of 16 tokens, float32 (and ours in bfloat16, sample.py's --dtype=bfloat16), sampled at temperature
0.8 from the top 200. In a repeat all
make the same number of tokens one after the other, and a ratio is made within a repeat, so that a machine whose speed
drifts does not decide. Above 1 is in our favour.

A new token needs each weight once, so a step takes at least the bytes of weights (and of cached keys and values) over the
memory's bandwidth: the best of several reads of a matrix that no cache holds, made in each repeat.
"""

import argparse
import os
import platform
import statistics
import sys
import time

import torch

from engine.processes import choose_precision
from model import GPT, ModelConfig, generate

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PROMPT = 16


def seconds(f):
    started = time.perf_counter()
    f()
    return time.perf_counter() - started


def bandwidth(matrix, vector):
    """GB/s at which memory is read: the fastest of matrix-vector products, row by row and column by column, and sums."""
    reads = (lambda: torch.mv(matrix, vector), lambda: torch.mv(matrix.t(), vector), lambda: matrix.sum())
    return matrix.numel() * matrix.element_size() / min(seconds(read) for read in reads for _ in range(2)) / 1e9


def ours(new, dtype="float32"):
    model = GPT(ModelConfig(mlp="gelu_tanh"))
    model.init_weights(0)
    precision = choose_precision("cpu", dtype, bf16_supported=True)

    def run(tokens):
        with precision.context("cpu"):
            assert sum(len(row) for row in generate(model, tokens, new, temperature=0.8, top_k=200)) == new * len(tokens)
    return run


def transformers(new):
    from transformers import GPT2Config, GPT2LMHeadModel
    model = GPT2LMHeadModel(GPT2Config()).eval()

    def run(tokens):
        made = model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=True, temperature=0.8, top_k=200, max_new_tokens=new,
                              min_new_tokens=new, pad_token_id=0)
        assert made.shape == (len(tokens), PROMPT + new)
    return run


def nanogpt(new, peer):
    ours = sys.modules.pop("model")
    sys.path.insert(0, os.path.abspath(peer))
    import model as theirs
    sys.path.pop(0)
    sys.modules["model"] = ours
    model = theirs.GPT(theirs.GPTConfig(vocab_size=50257, dropout=0.0)).eval()  # type: ignore[attr-defined]

    def run(tokens):  # what its sample.py does with a prompt
        with torch.no_grad():
            made = model.generate(tokens, new, temperature=0.8, top_k=200)
        assert made.shape == (len(tokens), PROMPT + new)
    return run


def bytes_a_step(batch, new):
    """Weights, the head among them, and the keys and values of the tokens before, on average over a run, in float32."""
    c = ModelConfig()
    with torch.device("meta"):
        weights = sum(p.numel() for name, p in GPT(c).named_parameters() if name != "wpe.weight")
    return 4 * (weights + batch * (PROMPT + new / 2) * 2 * c.n_layer * c.n_embd)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="a nanoGPT checkout; left out of the comparison where none is given")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", default="1,8", help="batch sizes")
    parser.add_argument("--new_tokens", type=int, default=256)
    parser.add_argument("--peer_repeats", type=int, default=2, help="of them with nanoGPT, which takes half a minute and more")
    args = parser.parse_args()
    new = args.new_tokens
    sides = {"boringGPT": ours(new), "in bfloat16": ours(new, "bfloat16"), "transformers": transformers(new)}
    if args.peer:
        sides["nanoGPT"] = nanogpt(new, args.peer)
    matrix, vector = torch.randn(11264, 11264), torch.randn(11264)  # 508 MB, as much as the weights
    print(f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}, "
          f"load {os.getloadavg()[0]:.1f}; {new} new tokens, medians of {args.repeats} repeats", flush=True)
    for batch in map(int, args.only.split(",")):
        tokens = torch.randint(0, 50257, (batch, PROMPT), generator=torch.Generator().manual_seed(0))
        for name in ("boringGPT", "in bfloat16"):
            sides[name](tokens)  # once, uncounted: first calls set up their kernels
        rates, reads = {name: [] for name in sides}, []
        for n in range(args.repeats):
            reads.append(bandwidth(matrix, vector))
            for name, run in sides.items():
                if name != "nanoGPT" or n < args.peer_repeats:
                    rates[name].append(batch * new / seconds(lambda: run(tokens)))
        limit = [batch * gb * 1e9 / bytes_a_step(batch, new) for gb in reads]
        shares = sorted(rate / most for rate, most in zip(rates["boringGPT"], limit))
        print(f"batch {batch}: memory {statistics.median(reads):.1f} GB/s (best {max(reads):.1f}) allows {statistics.median(limit):.1f} tokens/s; "
              f"boringGPT {statistics.median(rates['boringGPT']):.1f} tokens/s (best {max(rates['boringGPT']):.1f}), {statistics.median(shares):.0%} of it "
              f"({shares[0]:.0%} to {shares[-1]:.0%}), load {os.getloadavg()[0]:.1f}")
        for name, found in rates.items():
            if name != "boringGPT":
                ratios = sorted(a / b for a, b in zip(rates["boringGPT"], found))
                print(f"{name:>14} {statistics.median(found):7.1f} tokens/s (best {max(found):.1f})   boringGPT / {name} {statistics.median(ratios):5.2f} "
                      f"({ratios[0]:.2f} to {ratios[-1]:.2f})", flush=True)


if __name__ == "__main__":
    main()
