"""MB of text a second that prepare.py turns into GPT-2 tokens, beside tiktoken alone and beside nanoGPT's way.

    python -m tests.bench.prepare [--repeats 5] [--megabytes 150] [--peer_repeats 1]

The text: the source of the standard library a document a file, and tiny shakespeare a speech a document (where the tests' assets have it), over
and over, as a .jsonl. tiktoken: encode_ordinary_batch on texts that lie in memory, 16 MB of them at a time, on every core; its tokens
go nowhere. prepare.py: the whole command, from the file to the finished shards with their checksums, its start included. nanoGPT's way: what its
data/openwebtext/prepare.py does (datasets' map on as many processes, then 1,024 parts into one memory-mapped file), its start included. Ratios
are made within a repeat, so that a machine whose speed drifts does not decide. TIKTOKEN_CACHE_DIR says where the vocabulary lies without a network.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time

from data.sources import Counts, stdlib_source

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SHAKESPEARE = os.path.join(os.path.dirname(ROOT), "shared", "assets", "tinyshakespeare.txt")
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()

TIKTOKEN = """
import json, sys, time, tiktoken
encoding, batch, size, seconds = tiktoken.get_encoding("gpt2"), [], 0, 0.0
encoding.encode_ordinary_batch(["once, uncounted"] * 100, num_threads={cores})
def encode():
    global seconds
    started = time.perf_counter()
    encoding.encode_ordinary_batch(batch, num_threads={cores})
    seconds += time.perf_counter() - started
for line in open({path!r}, encoding="utf-8"):
    batch.append(json.loads(line)["text"])
    size += len(batch[-1])
    if size >= 16_000_000:
        encode()
        batch, size = [], 0
if batch:
    encode()
print(seconds)
"""

NANOGPT = """
import numpy as np, tiktoken
from datasets import load_dataset
encoding = tiktoken.get_encoding("gpt2")
def process(example):
    ids = encoding.encode_ordinary(example["text"])
    ids.append(encoding.eot_token)
    return dict(ids=ids, len=len(ids))
if __name__ == "__main__":
    found = load_dataset("json", data_files={path!r}, num_proc={cores}, cache_dir={folder!r})
    parts = found["train"].train_test_split(test_size=0.0005, seed=2357, shuffle=True)
    for split, dset in parts.map(process, remove_columns=["text"], num_proc={cores}).items():
        out = np.memmap({folder!r} + "/" + split + ".bin", dtype=np.uint16, mode="w+", shape=(np.sum(dset["len"], dtype=np.uint64),))
        at, shards = 0, min(1024, len(dset))
        for i in range(shards):
            ids = np.concatenate(dset.shard(num_shards=shards, index=i, contiguous=True).with_format("numpy")["ids"])
            out[at:at + len(ids)] = ids
            at += len(ids)
        out.flush()
"""


def write_corpus(path, megabytes):
    """A .jsonl of so many MB of text; returns (bytes of text, documents)."""
    texts = ["".join(pieces) for _, _, pieces in stdlib_source().documents(Counts())]
    if os.path.exists(SHAKESPEARE):
        with open(SHAKESPEARE, encoding="utf-8") as file:
            texts += file.read().split("\n\n")
    lines = [(json.dumps({"text": text}, ensure_ascii=False) + "\n", len(text.encode())) for text in texts if text]
    size = documents = 0
    with open(path, "w", encoding="utf-8") as file:
        while size < megabytes * 1e6:
            line, length = lines[documents % len(lines)]
            file.write(line)
            size, documents = size + length, documents + 1
    return size, documents


def run(*command, cwd=ROOT):
    """(seconds, standard output) of a command."""
    started = time.perf_counter()
    done = subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ROOT})
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return time.perf_counter() - started, done.stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=150, help="of text")
    parser.add_argument("--peer_repeats", type=int, default=1, help="of them with nanoGPT's way; it takes several times as long")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        corpus = os.path.join(folder, "corpus.jsonl")
        size, documents = write_corpus(corpus, args.megabytes)
        print(f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {CORES} cores, load {os.getloadavg()[0]:.1f}; {size / 1e6:.0f} MB of text in {documents:,} "
              f"documents, medians of {args.repeats} repeats", flush=True)
        rates = {"prepare.py": [], "tiktoken": [], "nanoGPT's way": []}
        for n in range(args.repeats):
            seconds, _ = run(os.path.join(ROOT, "prepare.py"), corpus, "--tokenizer=gpt2", "--overwrite", f"--out={folder}/ours", cwd=folder)
            rates["prepare.py"].append(size / seconds / 1e6)
            _, told = run("-c", TIKTOKEN.format(path=corpus, cores=CORES))
            rates["tiktoken"].append(size / float(told) / 1e6)
            if n < args.peer_repeats:
                script = os.path.join(folder, "theirs.py")  # a file: its processes may import it
                with open(script, "w") as file:
                    file.write(NANOGPT.format(path=corpus, cores=CORES, folder=tempfile.mkdtemp(dir=folder)))
                rates["nanoGPT's way"].append(size / run(script)[0] / 1e6)
    for name, found in rates.items():
        if found:
            ratios = sorted(ours / theirs for ours, theirs in zip(rates["prepare.py"], found))
            print(f"{name:>14} {statistics.median(found):6.1f} MB/s" + ("" if name == "prepare.py" else
                  f"   prepare.py / {name} {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}, {len(ratios)} pairs)"))


if __name__ == "__main__":
    main()
