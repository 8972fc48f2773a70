"""What a checkpoint costs training: how long the loop stands still for a save, plus what the updates after it lose, with and without
async_save; and the bytes a second written, beside a plain copy of the same files on the same disk.

    python -m tests.bench.saving [--threads 0] [--repeats 3]

GPT-2 124M with AdamW's moments (1.5 GB a checkpoint), updates of 1 x 256 tokens, a save each 10. --threads=1 leaves cores idle for the
writing, as a machine does whose GPU trains. The loss of the updates after a save: their sum, less as many of the run's median update.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
EVERY, SAVES = 10, 4  # of a run's saves the first is not counted: it takes fresh memory
SETTINGS = dict(n_layer=12, n_head=12, n_embd=768, block_size=256, batch_size=1, vocab_size=50304, total_batch_size=256, warmup_iters=1, eval_interval=0,
                sample_tokens=0, device="cpu", dtype="float32", save_interval=EVERY, keep_last=1, max_iters=EVERY * (SAVES + 1) - 1)


def measure(folder, async_save, threads):
    """One run: its saves as dicts of seconds: stalled, lost in the updates after, written in; bytes."""
    out = os.path.join(folder, "run")
    command = [sys.executable, os.path.join(ROOT, "train.py"), os.path.join(ROOT, "tests", "empty_config.py"), f"--out_dir={out}", f"--dataset={folder}/data",
               f"--async_save={async_save}", f"--threads={threads}", *[f"--{k}={v}" for k, v in SETTINGS.items()]]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout[-2000:] + done.stderr[-2000:])
    with open(f"{out}/metrics.jsonl") as f:
        lines = [json.loads(line) for line in f]
    steps = {r["step"]: r["step_ms"] / 1e3 for r in lines if r["kind"] == "train"}
    usual = statistics.median(steps[s] for s in steps if s > 2 and (s - 1) % EVERY >= EVERY // 2)  # far from a save
    saves = []
    for r in lines:
        if r.get("event") == "saved" and r["step"] % EVERY == 0 and r["step"] > EVERY:
            after = range(r["step"] + 1, r["step"] + EVERY)
            saves.append({"stalled": r["stalled"], "lost": sum(steps[s] - usual for s in after), "seconds": r["seconds"], "bytes": r["bytes"], "update": usual})
    newest = max(os.listdir(f"{out}/checkpoints"))
    started = time.perf_counter()
    for name in os.listdir(f"{out}/checkpoints/{newest}"):  # what a plain copy of it takes, synced as a checkpoint is
        shutil.copyfile(f"{out}/checkpoints/{newest}/{name}", f"{folder}/{name}")
        with open(f"{folder}/{name}", "rb+") as f:
            os.fsync(f.fileno())
    copied = time.perf_counter() - started
    for save in saves:
        save["copy"] = copied
    shutil.rmtree(out)
    return saves


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=0, help="of the training (0: as torch chooses)")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=os.path.join(ROOT, "out") if os.path.isdir(os.path.join(ROOT, "out")) else None) as folder:
        os.mkdir(f"{folder}/data")
        np.random.default_rng(0).integers(0, 50257, 400_000).astype("<u2").tofile(f"{folder}/data/train.bin")
        runs = [{mode: measure(folder, mode, args.threads) for mode in (False, True)} for _ in range(args.repeats)]
    print(f"124M, {args.threads or 'all'} threads, {args.repeats} pairs of runs with {SAVES - 1} saves each; medians")
    for mode in (False, True):
        saves = [s for r in runs for s in r[mode]]
        row = {k: statistics.median(s[k] for s in saves) for k in saves[0]}
        cost = statistics.median(s["stalled"] + s["lost"] for s in saves)
        print(f"{'async' if mode else 'sync':>6}: an update {row['update']:.2f} s | loop stalled {row['stalled']:.2f} s, updates after it lost {row['lost']:.2f} s, together "
              f"{cost:.2f} s | {row['bytes'] / 1e6:,.0f} MB in {row['seconds']:.2f} s, {row['bytes'] / row['seconds'] / 1e6:,.0f} MB/s; a plain copy "
              f"{row['bytes'] / row['copy'] / 1e6:,.0f} MB/s")
    ratios = [sum(s["stalled"] + s["lost"] for s in r[True]) / sum(s["stalled"] + s["lost"] for s in r[False]) for r in runs]
    print(f"async / sync: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}); of the stall alone "
          f"{statistics.median(s['stalled'] for r in runs for s in r[True]) / statistics.median(s['stalled'] for r in runs for s in r[False]):.2f}")


if __name__ == "__main__":
    main()
