"""A cluster job tried on a laptop before it is queued: `python train.py configs/llama_8b_hsdp.py --rehearse`.

The same train.py under the rung's own kinds of parallelism, each axis shrunk to 2, its kind of model at toy size, made-up tokens, CPU and
gloo, in a temporary folder. A process is killed once a checkpoint exists; torchrun (or, for one process, the same command again) has
to bring the run to its end, and each step has to stand in its curve once. Under torchrun the processes that are there do the same but
for the kill: they train, save, take everything down, load and go on, in <out_dir>.rehearsal, so that the machines' own disk is tried too.
"""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from data.shards import BEGIN, LABEL, META_VERSION, ShardWriter, write_meta
from data.tokenizers import load_tokenizer
from engine import checkpoint as ckpt
from engine.config import ROOT, Config
from engine.errors import EXIT_FAILED, UserError
from engine.processes import Place

STEPS, SAVE_EVERY = 40, 10
SECONDS = 180  # a rehearsal takes 5 to 20, and 30 more where torchrun has to end a process that waits
VOCABULARY = 257  # odd, so that the padding of the embedding is rehearsed too


def rehearse(argv: list[str], config: Config, place: Place, say: Callable[[str], Any], train: Callable[[list[str]], Any]) -> int:
    """Rehearses the loaded Config that the command line `argv` stands for; train(argv) makes a run. Returns the exit code."""
    if place.store is not None:
        return rehearse_here(argv, config, place, say, train)
    layout, mesh = shrunk_layout(config)
    ranks = math.prod(mesh.values()) * (2 if config.parallel == "ddp" else 1)
    settings = toy_settings(config, mesh, micro_batches=2 * ranks)
    folder = tempfile.mkdtemp(prefix="rehearsal-")
    run, log = os.path.join(folder, "run"), os.path.join(folder, "log.txt")
    settings |= {"out_dir": run, **toy_data(config, folder)}
    command = [os.path.join(ROOT, "train.py"), *argv, *[f"--{k}={v}" for k, v in settings.items()]]  # of a key given twice the last counts
    if layout == "single":
        command = [sys.executable, "-u", *command]
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "--max-restarts=2", *command]
    say(f"rehearsal: {layout} on {processes(ranks)}, a toy of {settings['n_layer']} layers in {settings['dtype']}, {STEPS} updates")
    started = time.time()
    try:
        killed = run_and_kill(command, layout, run, log)
        found = what_went_wrong(run, layout, ranks, mesh, killed)
    except Failed as failure:
        found = str(failure)
    if found:
        say(f"error: the rehearsal failed after {time.time() - started:.0f} s: {found}\nits last lines, of {log}:\n{last_lines(log)}")
        return EXIT_FAILED
    with open(os.path.join(run, "config.json"), encoding="utf-8") as f:
        saved = json.load(f)
    resumed = resumptions(run)
    say(f"mesh: {saved['layout']}, {processes(saved['world_size'])}, " + ", ".join(f"{k} {v}" for k, v in saved["mesh"].items()) + "\n"
        f"a process was killed after update {killed}; the run went on from the checkpoint of update {resumed[-1]} to the end\n"
        f"its curve has each of the {STEPS} updates once; all is well ({time.time() - started:.0f} s)")
    shutil.rmtree(folder)
    return 0


def rehearse_here(argv: list[str], config: Config, place: Place, say: Callable[[str], Any], train: Callable[[list[str]], Any]) -> int:
    """The rehearsal of processes that torchrun has started already."""
    layout, mesh = shrunk_layout(config)
    layout = "ddp" if layout == "single" else layout
    size = math.prod(n for axis, n in mesh.items() if axis != "dp_shard")
    if place.ranks % size:
        raise UserError(f"--rehearse of {' * '.join(f'{axis} {n}' for axis, n in mesh.items() if n > 1 and axis != 'dp_shard')} on {processes(place.ranks)}: a "
                        f"multiple of {size} processes would work")
    if layout == "fsdp":
        mesh["dp_shard"] = place.ranks // size
    run, folder = config.out_dir + ".rehearsal", tempfile.mkdtemp(prefix="rehearsal-")
    settings = toy_settings(config, mesh, micro_batches=2 * place.ranks) | {"out_dir": run, **toy_data(config, folder)}
    if place.speaks:
        shutil.rmtree(run, ignore_errors=True)
    place.from_first(None)  # nobody looks into the folder before it is empty
    say(f"rehearsal: {layout} on {processes(place.ranks)}, a toy of {settings['n_layer']} layers in {settings['dtype']}, {STEPS} updates")
    for updates in (STEPS // 2, STEPS):
        train([*argv, *[f"--{k}={v}" for k, v in {**settings, "max_iters": updates}.items()]])
    found = what_went_wrong(run, layout, place.ranks, mesh, STEPS // 2) if place.speaks else None
    found = place.from_first(found)
    say(f"error: the rehearsal failed: {found}; {run} has what it left" if found else
        f"saved after update {STEPS // 2}, taken down, loaded, and on to update {STEPS}: its curve has each of them once; all is well")
    if place.speaks and not found:
        shutil.rmtree(run)
    shutil.rmtree(folder)
    return EXIT_FAILED if found else 0


def processes(n: int) -> str:
    """So many processes, in words."""
    return "1 process" if n == 1 else f"{n} processes"


class Failed(Exception):
    """The reason why a rehearsal did not work out."""


def shrunk_layout(config: Config) -> tuple[str, dict[str, int]]:
    """The rung's layout, and its mesh with each axis shrunk to 2."""
    sharded = config.parallel == "fsdp" or config.dp_replicate > 1
    mesh = {"dp_replicate": min(2, config.dp_replicate), "dp_shard": 2 if sharded else 1, "cp": min(2, config.cp), "tp": min(2, config.tp)}
    layout = "fsdp" if sharded or config.tp > 1 else "ddp" if config.parallel == "ddp" or config.cp > 1 else "single"
    return layout, mesh


def toy_settings(config: Config, mesh: dict[str, int], micro_batches: int) -> dict[str, Any]:
    """Settings over the rung's that make it small and keep its kinds: grouped queries, a head size of its own, a wider MLP, accumulation,
    clipping, dropout, optimizer, schedule, checkpointing of activations and whatever else is not named here."""
    heads = config.n_kv_head or config.n_head
    own_head_dim = config.head_dim and config.head_dim != config.n_embd // config.n_head
    block, batch = 32, 2
    return {
        "rehearse": False, "plan": 0, "check": False,
        "n_layer": 2, "n_embd": 48, "n_head": 4, "n_kv_head": 4 if heads == config.n_head else 1 if heads == 1 else 2,
        "head_dim": 16 if own_head_dim else None, "mlp_hidden": max(8, round(48 * config.mlp_hidden / config.n_embd)) if config.mlp_hidden else None,
        "vocab_size": VOCABULARY, "block_size": block, "batch_size": batch, "total_batch_size": micro_batches * batch * block,
        "gradient_accumulation_steps": micro_batches, "dp_replicate": mesh["dp_replicate"], "cp": mesh["cp"], "tp": mesh["tp"],
        "max_iters": STEPS, "num_epochs": None, "warmup_iters": 2, "lr_decay_iters": STEPS, "learning_rate": 1e-3, "muon_learning_rate": 1e-3, "min_lr": None,
        "save_interval": SAVE_EVERY, "keep_last": 2, "keep_every": 0, "eval_interval": STEPS if config.eval_interval else 0, "eval_tokens": 256,
        "sample_tokens": 0, "log_interval": 10, "check_replicas_interval": 10 if config.check_replicas_interval else 0,
        "device": "cpu", "backend": "auto", "compile": False, "cpu_offload": False, "threads": 1, "collective_seconds": 60,
        "dtype": "float32" if config.dtype == "float32" else "bfloat16",  # what the rung computes in on a GPU
        "init_from": "scratch", "resize_vocab": False, "lora_rank": min(config.lora_rank, 4), "float8": False,
        "resume": "auto", "resume_step": None, "eval_only": False, "hellaswag": None, "wandb_log": False, "tensorboard_log": False, "profile": 0,
    }


def toy_data(config: Config, folder: str) -> dict[str, str]:
    """{setting: folder} of made-up data sets of the kinds that the rung reads: the architecture does not care what they say."""
    tokenizer, rng = load_tokenizer("byte"), np.random.default_rng(0)  # of VOCABULARY ids

    def make(name, counts, length):
        """A data set of pieces of some length, each the last third to be learnt where they are records."""
        path, splits = os.path.join(folder, name), {}
        os.mkdir(path)
        for split, count in counts.items():
            writer = ShardWriter(path, split, VOCABULARY, marked=name == "records")
            for n in length(count):
                marks = np.where(np.arange(n) >= 2 * n // 3, LABEL, 0)
                marks[0] |= BEGIN
                writer.write(rng.integers(0, VOCABULARY, n), marks)
            splits[split] = {"shards": writer.close()}
        write_meta(path, tokenizer, {"format_version": META_VERSION, "vocab_size": VOCABULARY, "tokenizer": tokenizer.identity(), "splits": splits})
        return path

    text = make("text", {"train": 20_000, "val": 1_000}, lambda count: [count])
    found = {key: text for key in ("dataset", "general_dataset", "replay_dataset") if getattr(config, key)}
    if config.task == "sft":
        found["dataset"] = make("records", {"train": 500, "val": 20}, lambda count: rng.integers(2, 34, count))
    return found


def run_and_kill(command: list[str], layout: str, run: str, log: str) -> int:
    """Runs the command, kills rank 0's process once a checkpoint exists, and sees the run to its end. Returns the step of the newest
    checkpoint at that moment; Failed where that does not work."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": os.path.dirname(run)}  # torchrun leaves folders in it
    with open(log, "ab") as output:
        def start():
            return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)

        process, deadline = start(), time.time() + SECONDS
        try:
            while not ckpt.list_steps(run):
                if process.poll() is not None:
                    raise Failed(f"it ended with code {process.returncode} before its first checkpoint")
                if time.time() > deadline:
                    raise Failed(f"no checkpoint after {SECONDS} s")
                time.sleep(0.002)
            if layout != "single":  # some updates on: in a save the others would wait for 10 s until they take it for dead
                time.sleep(0.05)
            os.kill(holder(run), signal.SIGKILL)  # rank 0's, which writes the log and the manifests: the hardest one to lose
            killed = ckpt.list_steps(run)[-1]
            if layout == "single":
                process.wait()
                process = start()  # the same command goes on
            code = process.wait(timeout=max(1, deadline - time.time()))
            if code:
                raise Failed(f"it ended with code {code} after a process was killed at update {killed} or later")
        except ProcessLookupError:
            raise Failed("it had ended before a process could be killed") from None
        except subprocess.TimeoutExpired:
            raise Failed(f"it was not at its end after {SECONDS} s") from None
        finally:
            if process.poll() is None:
                process.terminate()  # torchrun ends its workers
                process.wait()
    return killed


def holder(run: str) -> int:
    """The process id of rank 0, from the run's lock; ProcessLookupError where the run has let go of it."""
    for _ in range(100):
        with open(os.path.join(run, "lock"), encoding="utf-8") as f:
            if text := f.read():
                return json.loads(text)["pid"]
        time.sleep(0.001)  # it is being written
    raise ProcessLookupError


def what_went_wrong(run: str, layout: str, ranks: int, mesh: dict[str, int], killed: int) -> str | None:
    """None, or the sentence that says what a finished rehearsal should have left and did not."""
    with open(os.path.join(run, "config.json"), encoding="utf-8") as f:
        saved = json.load(f)
    if (saved["layout"], saved["world_size"], saved["mesh"]) != (layout, ranks, mesh):
        return (f"config.json has the layout {saved['layout']} on {processes(saved['world_size'])}, mesh {saved['mesh']}; expected {layout} on {ranks}, "
                f"{mesh}")
    steps = [r["step"] for r in records(run) if r["kind"] == "train"]
    if steps != list(range(1, STEPS + 1)):
        return f"metrics.jsonl has the updates {steps}, expected each of 1 to {STEPS} once"
    if not resumptions(run):
        return f"nothing says that it went on from a checkpoint after a process was killed at update {killed}"
    if STEPS not in ckpt.list_steps(run):
        return f"there is no checkpoint of update {STEPS}"
    ckpt.open_checkpoint(ckpt.step_folder(run, STEPS))
    return None


def records(run: str) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl."""
    with open(os.path.join(run, "metrics.jsonl"), encoding="utf-8") as f:
        return [json.loads(line) for line in f]


def resumptions(run: str) -> list[int]:
    """The updates whose checkpoints a run went on from."""
    return [r["step"] for r in records(run) if r["kind"] == "event" and r["event"] == "resumed"]


def last_lines(log: str, count: int = 20) -> str:
    """From the last fault that a rank told, where one did: torchrun's long report comes after it."""
    with open(log, encoding="utf-8", errors="replace") as f:
        lines = f.read().splitlines()
    told = [i for i, line in enumerate(lines) if line.startswith("error:")]
    return "\n".join(lines[told[-1]:][:count] if told else lines[-count:])
