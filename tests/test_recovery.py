"""What asks a run to stop, what hangs, what breaks on the way: the run saves, goes on, or says why it does not."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from conftest import ASSETS, ROOT, TINY, Job, alive, as_args, curve, records, some_text, steps, tensors, train, wait_for

# What breaks is the world around the loop, never the code that is to notice it: a config file is Python, and runs before all else.
TAKES_SECONDS = """
import time
from data.order import WindowReader
_batch = WindowReader.batch
def _slow(reader, *a, **k):
    time.sleep(0.02 if reader.order else 0.5)
    return _batch(reader, *a, **k)
WindowReader.batch = _slow
"""
HANGS = """
import os, time
from data.order import WindowReader
_batch = WindowReader.batch
def _hang(reader, start, count):  # rank 1 never comes back from reading a sample of update 7
    if reader.order and start >= 6 * 8 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        time.sleep(3600)
    return _batch(reader, start, count)
WindowReader.batch = _hang
"""
READS_SLOWLY = """
import os, time
from data.order import WindowReader
_batch = WindowReader.batch
def _slow(reader, start, count):
    time.sleep(0.06 if os.environ["RANK"] == "1" else 0)
    return _batch(reader, start, count)
WindowReader.batch = _slow
"""
COMPUTES_SLOWLY = """
import os, time
from model import Block
_forward = Block.forward
def _slow(block, *a, **k):
    time.sleep(0.02 if os.environ["RANK"] == "1" else 0)
    return _forward(block, *a, **k)
Block.forward = _slow
"""
BREAKS = """
import os, torch
from engine.optim import AdamW
_step, _times = AdamW.step, [{times}]
def _break(self, *a):  # a weight of the last rank turns into NaN after an update
    _step(self, *a)
    if self.updates == {after} and _times[0] and os.environ.get("RANK", "0") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1):
        _times[0] -= 1
        p = next(iter(self.parameters.values())).detach()
        (p.to_local() if hasattr(p, "to_local") else p).view(-1)[0] = torch.nan
AdamW.step = _break
"""


# -------------------------------------------------------------------------------------------------------------- signals

SIGNALS = [(where, *how) for where in ("first step", "step", "evaluation") for how in ((1, "worker", "single"), (2, "torchrun", "ddp"), (2, "worker", "fsdp"))]
ALWAYS = [("first step", "ddp"), ("step", "single"), ("step", "fsdp"), ("evaluation", "single"), ("evaluation", "ddp")]


@pytest.mark.parametrize("where, n, target, parallel", [case if (case[0], case[3]) in ALWAYS else pytest.param(*case, marks=pytest.mark.full) for case in SIGNALS])
def test_a_signal_leaves_one_checkpoint_of_one_step_and_an_equal_curve(where, n, target, parallel, data, tmp_path):
    (tmp_path / "slow.py").write_text(TAKES_SECONDS)
    run, whole = tmp_path / "run", tmp_path / "whole"
    settings = dict(parallel=parallel, deterministic=True, max_iters=4, save_interval=50, config=tmp_path / "slow.py")
    if where == "evaluation":
        settings |= dict(eval_interval=2, eval_tokens=10**9, save_interval=2)
        shown = "saved"
    else:
        settings |= dict(total_batch_size=2 * 16 * 200)  # 4 s on one process
        shown = "device:" if where == "first step" else "step 1/"
    job = Job(n, run, data, **settings)
    job.wait_for(lambda: shown in job.text)
    time.sleep(0.5)
    asked = time.time()
    os.kill(job.process.pid if target == "torchrun" else job.workers()[-1], signal.SIGTERM)
    code = job.end(60)
    assert time.time() - asked < 15, job.text
    assert code == 143 if n == 1 else code, job.text
    expected = {"first step": 0, "step": 1, "evaluation": 2}[where]
    assert steps(run) == [expected] and f"SIGTERM: saving update {expected} and leaving" in job.text, job.text
    assert sorted(curve(run)) == list(range(1, expected + 1)) and not records(run, "val")
    if where == "evaluation":
        assert job.text.count("validation loss") == 0
        settings |= dict(eval_tokens=64)  # it is made up for
    else:
        settings |= dict(max_iters=expected)  # a long update once more would prove nothing new
    train(run, data, n=n, **settings)
    if where == "evaluation":
        assert [r["step"] for r in records(run, "val")] == [2, 4]
        train(whole, data, **{**settings, "parallel": "single"})
        assert curve(run) == curve(whole) and tensors(run, 4) == tensors(whole, 4)


@pytest.mark.skipif(not os.path.isdir(os.path.join(ASSETS, "tiktoken")), reason="needs GPT-2's vocabulary, whose tokenizer is slow enough")
def test_a_signal_while_data_are_prepared_leaves_nothing_half_made(tmp_path):
    text = tmp_path / "corpus"
    text.mkdir()
    lines = some_text(500_000)
    for i in range(300):
        (text / f"{i}.txt").write_text(lines)
    code = ("import sys, train, prepare, engine.feed; real = prepare.prepare\n"
            f"engine.feed.find_text = lambda name, say: (say('preparing'), real({str(text)!r}, tokenizer='gpt2', out={str(tmp_path / 'set')!r}))[1]\n"
            "sys.exit(train.main(sys.argv[1:]))")
    process = subprocess.Popen([sys.executable, "-u", "-c", code, "tests/empty_config.py", f"--out_dir={tmp_path / 'run'}", "--dataset=x", *as_args(TINY)], cwd=ROOT,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               env={**os.environ, "TIKTOKEN_CACHE_DIR": os.path.join(ASSETS, "tiktoken")})
    assert any("preparing" in line for line in process.stdout)
    time.sleep(0.7)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 143 and "SIGTERM: leaving" in out and "Traceback" not in out, out
    assert not (tmp_path / "run").exists() and not (tmp_path / "set").exists() and os.listdir(tmp_path) == ["corpus"]


@pytest.mark.parametrize("n, seconds", [(1, 6), (2, 10)])
def test_the_time_limit_saves_and_leaves_for_good(n, seconds, data, tmp_path):
    run = tmp_path / "run"
    job = Job(n, run, data, ["--standalone", "--max-restarts=2"] if n > 1 else ("--standalone",), time_limit=seconds, max_iters=100_000)
    assert job.end(90) == 143 or n > 1
    assert job.text.count("time_limit: saving update") == 1 and "going on from" not in job.text, job.text  # torchrun's restarts leave at once
    assert len(steps(run)) == 1 and max(curve(run)) == steps(run)[0] > 0


@pytest.mark.parametrize("n", [1, 2])
def test_the_save_of_a_stop_waits_for_the_one_in_the_background(n, data, tmp_path):
    run = tmp_path / "run"
    job = Job(n, run, data, async_save=True, save_interval=3, keep_last=-1, max_iters=100_000, log_interval=3)
    job.wait_for(lambda: job.step >= 9)
    os.kill(job.process.pid, signal.SIGTERM)
    job.end(60)
    found = steps(run)
    assert found[-1] == max(curve(run)) and set(range(3, 10, 3)) <= set(found), job.text
    assert not [name for name in os.listdir(run / "checkpoints") if name.startswith(".")]


# ---------------------------------------------------------------------------------------------------- hangs and orphans


@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp", marks=pytest.mark.full)])
def test_a_hang_ends_with_every_ranks_stacks_and_torchrun_starts_again(parallel, data, tmp_path):
    (tmp_path / "hangs.py").write_text(HANGS)
    run = tmp_path / "run"
    job = Job(2, run, data, ["--standalone", "--max-restarts=1"], config=tmp_path / "hangs.py", parallel=parallel, watchdog_seconds=4, save_interval=5, max_iters=10,
              deterministic=True)
    assert job.end(120) == 0, job.text
    told = re.findall(r"error: no step was finished in watchdog_seconds=4: rank (\d) on \S+ was in step 7 ", job.text)
    assert sorted(told) == ["0", "1"] and "in _hang" in job.text and job.text.count("in run_rank") == 2, job.text
    train(tmp_path / "whole", data, max_iters=10, deterministic=True)
    assert curve(run) == curve(tmp_path / "whole") and [r["step"] for r in records(run, "event") if r["event"] == "resumed"] == [5]


def test_workers_of_a_killed_torchrun_do_not_go_on_alone(data, tmp_path):
    run = tmp_path / "run"
    job = Job(2, run, data, max_iters=100_000, save_interval=5)
    job.wait_for(lambda: job.step >= 10)
    orphans = job.workers()
    job.process.kill()
    job.process.wait()
    wait_for(lambda: not any(map(alive, orphans)), 10)
    train(run, data, max_iters=steps(run)[-1] + 1, lr_decay_iters=100_000, save_interval=5)


# ------------------------------------------------------------------------------------------------------------ bad steps


def all_finite(run):
    from engine.checkpoint import open_checkpoint

    for step in steps(run):
        c = open_checkpoint(os.path.join(run, "checkpoints", f"step_{step:08d}"))
        for part in ("model", "optimizer"):
            assert all(c.read(part, n).isfinite().all() for n in c.names(part)), step


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory):
    """(data set, weights to start from): the letter Q stands in one place, and its embedding overflows in the first norm."""
    from safetensors.torch import load_file, save_file

    from prepare import prepare

    folder = tmp_path_factory.mktemp("poisoned")
    text = some_text(1600)
    (folder / "text.txt").write_text(text[:700] + "Q" + text[701:] + some_text(400, 1))
    data = prepare(str(folder / "text.txt"), tokenizer="byte", val_fraction=0.2, workers=1, out=str(folder / "set"), quiet=True)
    weights = folder / "weights"
    train(weights, data, max_iters=0, tie_embeddings=False)
    file = weights / "checkpoints" / "step_00000000" / "model.safetensors"
    found = load_file(file)
    found["wte.weight"][ord("Q")] = 1e30
    save_file(found, file)
    manifest_of(weights, 0, file)
    return data, weights


def manifest_of(run, step, file):
    """Makes the manifest fit a file that was changed."""
    from engine.checkpoint import file_checksum, json_checksum

    path = run / "checkpoints" / f"step_{step:08d}" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest.pop("sha256")
    manifest["files"][file.name] = {"bytes": file.stat().st_size, "crc32": file_checksum(file)}
    path.write_text(json.dumps({**manifest, "sha256": json_checksum(manifest)}))


@pytest.mark.parametrize("n", [1, 2])
def test_a_poisoned_batch_is_passed_over_and_named(n, poisoned, tmp_path):
    data, weights = poisoned
    run = tmp_path / "run"
    out = train(run, data, n=n, init_from=weights, tie_embeddings=False, max_iters=12, save_interval=1, keep_last=-1).out
    event, = [r for r in records(run, "event") if r["event"] == "bad_step"]
    assert sorted(curve(run)) == list(range(1, 13)) and all(math.isfinite(v) for c in curve(run).values() for v in c)
    assert event["samples"][1] == 8 and len(event["windows"]) == 8 and "nan" in event["loss"]
    assert 700 // 16 in event["windows"], "the window that holds the Q"
    assert out.count("update skipped") == 1
    all_finite(run)


@pytest.mark.parametrize("n, parallel", [(1, "single"), (2, "ddp"), (2, "fsdp")])
def test_a_state_that_broke_goes_back_to_the_last_checkpoint_and_passes_over(n, parallel, data, tmp_path):
    (tmp_path / "breaks.py").write_text(BREAKS.format(after=6, times=1))
    run = tmp_path / "run"
    out = train(run, data, tmp_path / "breaks.py", n=n, parallel=parallel, max_iters=12, save_interval=4, keep_last=-1, max_bad_steps=2, deterministic=True).out
    assert out.count("2 updates in a row were not finite: going back to update 4 and passing over those samples") == 1, out
    assert sorted(curve(run)) == list(range(1, 13)) and all(math.isfinite(v) for c in curve(run).values() for v in c)
    back, = [r for r in records(run, "event") if r["event"] == "went_back"]
    assert back["step"] == 4 and back["left_at"] == 6 and back["passing_over"] == [[48, 8], [56, 8]]
    assert [r["samples"] for r in records(run, "event") if r["event"] == "passed_over"] == [[48, 8], [56, 8]]
    manifest = json.loads((run / "checkpoints" / "step_00000012" / "manifest.json").read_text())
    assert manifest["skips"] == [[7, 48, 8], [7, 56, 8]] and manifest["samples"] == 14 * 8
    all_finite(run)


def test_bad_again_after_going_back_is_the_end_and_is_said(data, tmp_path):
    (tmp_path / "breaks.py").write_text(BREAKS.format(after=6, times=9))
    run = tmp_path / "run"
    job = Job(2, run, data, ["--standalone", "--max-restarts=2"], config=tmp_path / "breaks.py", max_iters=12, save_interval=4, keep_last=-1, max_bad_steps=2)
    assert job.end(120) and job.text.count("again after going back to update 4") == 1 and job.text.count("going on from") == 0, job.text
    assert steps(run) == [4]
    all_finite(run)


@pytest.mark.parametrize("async_save", [False, True])
def test_weights_that_are_not_finite_are_never_written(async_save, data, tmp_path):
    (tmp_path / "breaks.py").write_text(BREAKS.format(after=8, times=1))
    run = tmp_path / "run"
    result = train(run, data, tmp_path / "breaks.py", max_iters=12, save_interval=4, keep_last=-1, async_save=async_save, deterministic=True)
    assert "the weights are not finite: going back to update 4" in result.out, result.out
    train(tmp_path / "whole", data, max_iters=12, deterministic=True)
    assert curve(run) == curve(tmp_path / "whole"), "nothing was bad but the memory: the same curve"
    assert steps(run) == [4, 8, 12]
    all_finite(run)


def test_a_state_that_broke_before_the_first_checkpoint_starts_again_from_the_first_values(data, tmp_path):
    (tmp_path / "breaks.py").write_text(BREAKS.format(after=3, times=1))
    run = tmp_path / "run"
    result = train(run, data, tmp_path / "breaks.py", max_iters=8, max_bad_steps=1)
    assert "going back to update 0" in result.out and sorted(curve(run)) == list(range(1, 9)), result.out
    train(tmp_path / "whole", data, max_iters=3)
    assert [curve(run)[s][:2] for s in (1, 2, 3)] == [c[:2] for c in curve(tmp_path / "whole").values()]


# ------------------------------------------------------------------------------------------------------------ slow ranks


@pytest.mark.parametrize("fault, layout, named", [
    (READS_SLOWLY, dict(parallel="ddp"), True), (COMPUTES_SLOWLY, dict(parallel="ddp"), True), (COMPUTES_SLOWLY, dict(parallel="fsdp"), True),
    (READS_SLOWLY, dict(cp=2), True), (COMPUTES_SLOWLY.replace("0.02", "0.05"), dict(n=2, tp=2, n_head=4, total_batch_size=32), True), ("", dict(parallel="ddp"), False)])
def test_a_slow_rank_is_named(fault, layout, named, data, tmp_path):
    (tmp_path / "slow.py").write_text(fault)
    out = train(tmp_path / "run", data, tmp_path / "slow.py", **{"n": 4, "max_iters": 30, "total_batch_size": 8 * 32, **layout}).out
    found = [r for r in records(tmp_path / "run", "event") if r["event"] == "slow_rank"]
    assert [r["rank"] for r in found] == ([1] if named else []) and out.count("warning: rank 1 on") == named, out


@pytest.mark.quick
def test_a_rank_is_named_after_twenty_updates_in_a_row_and_once():
    from engine.recovery import SlowRanks

    slow = SlowRanks()
    told = [slow.note([1.0, 1.1, 1.5, 1.0]) for _ in range(25)]
    assert [i for i, t in enumerate(told) if t] == [19] and told[19] == [(2, pytest.approx(1.5))]
    assert not slow.note([1.0, 1.0, 1.0, 1.0])
    assert not any(slow.note([1.0, 1.0, 1.5, 1.0]) for _ in range(19)) and slow.note([1.0, 1.0, 1.5, 1.0])
    assert not any(SlowRanks().note([1e-4, 9e-4]) for _ in range(25)), "a millisecond is noise"


# ------------------------------------------------------------------------------------------------- saves in the background


@pytest.mark.parametrize("n, parallel", [(1, "single"), (2, "ddp"), (2, "fsdp")])
def test_saving_in_the_background_saves_what_the_step_was(n, parallel, data, tmp_path):
    here, behind = tmp_path / "here", tmp_path / "behind"
    settings = dict(parallel=parallel, max_iters=9, save_interval=1, keep_last=-1, n_embd=192, eval_interval=3, deterministic=True)
    for run, async_save in ((here, False), (behind, True)):
        train(run, data, n=n, async_save=async_save, **settings)
    assert steps(here) == steps(behind) == list(range(1, 10)) and curve(here) == curve(behind)
    assert all(tensors(here, s) == tensors(behind, s) for s in range(1, 10)), "no later update came into the copy"
    assert (behind / "checkpoints" / "best").is_dir() == (here / "checkpoints" / "best").is_dir()
    assert sorted(r["step"] for r in records(behind, "event") if r["event"] == "saved") == list(range(1, 10))
