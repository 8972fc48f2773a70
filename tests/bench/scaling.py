"""What processes cost and bring on one machine: tokens/s of DDP and FSDP on N processes of one thread each over one process of N
threads, and what deterministic=True costs.

    python -m tests.bench.scaling [--processes 2] [--shape 124m] [--micro_batches 8] [--repeats 3] [--only ddp]

GPT-2 124M, block 512, micro-batches of 2, `micro_batches` of them a process. Runs are made in turn, ratios within a repeat.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

import numpy as np

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SHAPES = {"124m": dict(n_layer=12, n_head=12, n_embd=768, block_size=512, batch_size=2, vocab_size=50304),
          "small": dict(n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=8, vocab_size=257)}


def step_ms(folder, name, processes, settings):
    """The median step of a run, without its first."""
    out = tempfile.mkdtemp(dir=folder)
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
    command = [sys.executable, *launch, os.path.join(ROOT, "train.py"), os.path.join(ROOT, "tests", "empty_config.py"), f"--out_dir={out}/run",
               f"--dataset={folder}/data", *[f"--{k}={v}" for k, v in settings.items()]]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout[-2000:] + done.stderr[-2000:])
    with open(f"{out}/run/metrics.jsonl") as f:
        return statistics.median(r["step_ms"] for r in map(json.loads, f) if r["kind"] == "train" and r["step"] > 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--shape", default="124m", choices=SHAPES)
    parser.add_argument("--micro_batches", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--updates", type=int, default=3, help="the first one of each run is not counted")
    parser.add_argument("--only", help="runs to make besides single, of: ddp, ddp deterministic, fsdp, fsdp deterministic")
    args = parser.parse_args()
    n, shape = args.processes, SHAPES[args.shape]
    common = {**shape, "total_batch_size": n * args.micro_batches * shape["batch_size"] * shape["block_size"], "max_iters": args.updates, "warmup_iters": 1,
              "eval_interval": 0, "save_interval": 10**6, "sample_tokens": 0, "device": "cpu", "dtype": "float32"}
    runs = {"single": (1, dict(threads=n)), "ddp": (n, dict(parallel="ddp", threads=1)), "ddp deterministic": (n, dict(parallel="ddp", deterministic=True)),
            "fsdp": (n, dict(parallel="fsdp", threads=1)), "fsdp deterministic": (n, dict(parallel="fsdp", deterministic=True))}
    if args.only:
        runs = {name: run for name, run in runs.items() if name in ("single", *args.only.split(","))}
    with tempfile.TemporaryDirectory() as folder:
        os.mkdir(f"{folder}/data")
        for split in ("train", "val"):
            np.random.default_rng(0).integers(0, 257, 400_000).astype("<u2").tofile(f"{folder}/data/{split}.bin")
        repeats = [{name: step_ms(folder, name, size, {**common, **more}) for name, (size, more) in runs.items()} for _ in range(args.repeats)]
    print(f"{args.shape}, {n} processes, {n * args.micro_batches} micro-batches an update; medians of {args.repeats}")
    for name in runs:
        ratios = [r["single"] / r[name] for r in repeats]
        print(f"{name:>20} {statistics.median(r[name] for r in repeats) / 1e3:7.2f} s an update, {statistics.median(ratios):.2f} of one process's tokens/s "
              f"({min(ratios):.2f} to {max(ratios):.2f})", flush=True)


if __name__ == "__main__":
    main()
