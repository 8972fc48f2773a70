"""Speed and memory beside a nanoGPT checkout, on this machine, both scripts run as their users run them.

    python -m tests.bench --peer PATH_TO_NANOGPT [--repeats 5] [--only char,124m] [--json out/bench.json]

Each repeat starts nanoGPT's train.py and ours one after the other on the same token file with the same settings, and takes
the median of the step times that each reports itself; a ratio is made within a repeat, so that a machine whose speed
drifts does not decide. Above 1 is in our favour. Nothing is written into the checkout.
"""

import argparse
import json
import os
import pickle
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
import torch

from engine.matmul import linear

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

SHAPES = {  # name: (vocabulary, updates, settings that both scripts know)
    "char": (65, 60, dict(n_layer=4, n_head=4, n_embd=128, block_size=64, batch_size=12)),  # nanoGPT's CPU shakespeare_char
    "6x384": (65, 12, dict(n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=8)),
    "124m-1024": (50304, 3, dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, batch_size=8)),  # for memory; 2 pairs at most
    "124m": (50304, 6, dict(n_layer=12, n_head=12, n_embd=768, block_size=512, batch_size=2)),
}
WARMUP = 2  # updates that are not counted
RECOMPUTED = {"124m-1024": ("selective", "block")}  # shapes that are also run with activation checkpointing, beside nanoGPT without


def prepare_workplace(folder, peer):
    """A folder from which nanoGPT's train.py runs, with its data: it reads configurator.py and data/ from where it stands."""
    for name in ("train.py", "model.py", "configurator.py"):
        os.symlink(os.path.join(os.path.abspath(peer), name), os.path.join(folder, name))
    for name, (vocab, _, _) in SHAPES.items():
        data = os.path.join(folder, "data", name)
        os.makedirs(data)
        for split in ("train", "val"):
            np.random.default_rng(0).integers(0, vocab, 200_000).astype("<u2").tofile(os.path.join(data, f"{split}.bin"))
        if vocab == 65:
            chars = [chr(48 + i) for i in range(65)]
            with open(os.path.join(data, "meta.pkl"), "wb") as f:
                pickle.dump({"vocab_size": 65, "itos": dict(enumerate(chars)), "stoi": {c: i for i, c in enumerate(chars)}}, f)


def run(command, folder, first_step):
    """Runs a training; returns its output, seconds to its first step's line, and peak memory in MB."""
    started, first, lines = time.perf_counter(), None, []
    process = subprocess.Popen([sys.executable, "-u", *command], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for line in process.stdout:
        lines.append(line)
        if first is None and line.startswith(first_step):
            first = time.perf_counter() - started
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit("".join(lines[-20:]))
    return "".join(lines), first, usage.ru_maxrss / 1024


def measure(shape, folder, n):
    """One pair: {"nanogpt": {...}, "ours": {...}} with median step in ms, seconds to the first step, peak MB."""
    _, updates, settings = SHAPES[shape]
    common = [f"--{k}={v}" for k, v in {**settings, "dataset": shape, "gradient_accumulation_steps": 1, "dropout": 0.0, "device": "cpu", "dtype": "float32",
                                        "compile": False, "max_iters": updates, "log_interval": 1, "eval_interval": 10**6, "eval_iters": 1}.items()]
    out, first, peak = run(["train.py", f"--out_dir=out-{shape}", *common], folder, "iter 0:")
    times = [float(t) for t in re.findall(r"^iter \d+: .*time ([\d.]+)ms", out, re.M)]
    found = {"nanogpt": {"step_ms": statistics.median(times[WARMUP:]), "first_s": first, "peak_mb": peak}}
    for kind in ("none", *RECOMPUTED.get(shape, ())):
        out_dir, tag = f"ours-{shape}-{n}-{kind}", "" if kind == "none" else f", {kind}"
        ours = [os.path.join(ROOT, "train.py"), os.path.join(ROOT, "tests", "empty_config.py"), f"--out_dir={out_dir}", *common,
                f"--dataset={os.path.join(folder, 'data', shape)}", "--eval_interval=0", "--sample_tokens=0", f"--activation_checkpointing={kind}"]
        _, first, peak = run(ours, folder, "step 1/")
        with open(os.path.join(folder, out_dir, "metrics.jsonl")) as f:
            times = [r["step_ms"] for r in map(json.loads, f) if r["kind"] == "train"]
        shutil.rmtree(os.path.join(folder, out_dir))
        found.setdefault("ours", {}).update({f"step_ms{tag}": statistics.median(times[WARMUP:]), f"first_s{tag}": first, f"peak_mb{tag}": peak})
        found["nanogpt"] |= {f"{what}{tag}": found["nanogpt"][what] for what in ("step_ms", "first_s", "peak_mb")}
    return found


def matmul_peak():
    """GFLOP/s of a large float32 product on this machine's threads, the fastest of oneDNN's and of MKL's."""
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    best = float("inf")
    for product in (torch.mm, linear) * 6:
        started = time.perf_counter()
        product(a, b)
        best = min(best, time.perf_counter() - started)
    return 2 * 2048**3 / best / 1e9


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", required=True, help="a nanoGPT checkout")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default=",".join(SHAPES), help="shapes, of " + ", ".join(SHAPES))
    parser.add_argument("--json", default=os.path.join(ROOT, "out", "bench.json"))
    args = parser.parse_args()
    peak = matmul_peak()
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}, matmul peak {peak:.0f} GFLOP/s"
    print(f"{time.strftime('%Y-%m-%d')}, {machine}; medians of {args.repeats} pairs, ratio nanoGPT / ours with its lowest and highest")
    table = []
    with tempfile.TemporaryDirectory() as folder:
        prepare_workplace(folder, args.peer)
        for shape in args.only.split(","):
            pairs = [measure(shape, folder, n) for n in range(min(args.repeats, 2) if shape in RECOMPUTED else args.repeats)]
            tokens = SHAPES[shape][2]["batch_size"] * SHAPES[shape][2]["block_size"]
            rows = [("step_ms", "ms a step"), ("first_s", "s to the first step"), ("peak_mb", "MB peak")]
            rows += [(f"{what}, {kind}", f"{unit}, {kind}") for kind in RECOMPUTED.get(shape, ()) for what, unit in rows if what != "first_s"]
            for what, unit in rows:
                ratios = sorted(p["nanogpt"][what] / p["ours"][what] for p in pairs)
                theirs, ours = (statistics.median(p[side][what] for p in pairs) for side in ("nanogpt", "ours"))
                row = {"shape": shape, "what": what, "nanogpt": theirs, "ours": ours, "ratio": statistics.median(ratios), "low": ratios[0], "high": ratios[-1]}
                if what == "step_ms":
                    row["tokens_per_s"] = {"nanogpt": tokens / theirs * 1e3, "ours": tokens / ours * 1e3}
                table.append(row)
                print(f"{shape:>9} {unit:<20} nanoGPT {theirs:9.1f}   ours {ours:9.1f}   ratio {row['ratio']:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})", flush=True)
    os.makedirs(os.path.dirname(os.path.abspath(args.json)), exist_ok=True)
    with open(args.json, "w") as f:
        json.dump({"date": time.strftime("%Y-%m-%d"), "machine": machine, "matmul_gflops": peak, "repeats": args.repeats, "rows": table}, f, indent=1)


if __name__ == "__main__":
    main()
