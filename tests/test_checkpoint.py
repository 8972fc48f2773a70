"""A checkpoint is complete or it does not exist; nothing in one is ever unpickled; one job writes a folder."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from conftest import ROOT, TINY, Job, as_args, curve, records, steps, tensors, train, wait_for
from engine import checkpoint as ckpt
from engine.errors import UserError
from engine.processes import Place


@pytest.fixture(scope="module")
def three(data, tmp_path_factory):
    run = tmp_path_factory.mktemp("three") / "run"
    train(run, data, max_iters=6, save_interval=2, keep_last=-1)
    return run


@pytest.fixture
def run(three, tmp_path):
    return shutil.copytree(three, tmp_path / "run")


def command(out_dir, data, **settings):
    return [sys.executable, "train.py", "tests/empty_config.py", f"--out_dir={out_dir}", f"--dataset={data}", *as_args({**TINY, **settings})]


@pytest.mark.quick
def test_what_is_written_is_plain_safetensors(tmp_path):
    odd = {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "c": torch.zeros(2, 0), "scalar": torch.tensor(1.5)}
    ckpt.write_safetensors(tmp_path / "x.safetensors", odd)
    back = load_file(tmp_path / "x.safetensors")
    assert set(back) == set(odd) and all(torch.equal(back[n], t) and back[n].dtype == t.dtype for n, t in odd.items())


@pytest.mark.parametrize("damage", ["truncate", "flip", "flip manifest", "no manifest", "no file", "empty folder", "empty manifest"])
def test_a_damaged_checkpoint_is_seen_and_the_one_before_it_taken(damage, run, three, data):
    newest = run / "checkpoints" / "step_00000006"
    file = newest / ("manifest.json" if "manifest" in damage else "optimizer.safetensors")
    if damage == "truncate":
        os.truncate(file, os.path.getsize(file) - 1)
    elif damage.startswith("flip"):
        raw = bytearray(file.read_bytes())
        at = raw.index(b'"samples": ') + 11 if "manifest" in damage else len(raw) // 2
        raw[at] ^= 1
        file.write_bytes(raw)
    elif damage == "empty folder":
        shutil.rmtree(newest)
        newest.mkdir()
    elif damage == "empty manifest":
        file.write_text("")
    else:
        file.unlink()
    result = train(run, data, max_iters=6, save_interval=2, keep_last=-1)
    assert f"warning: {newest} is damaged" in result.out and "update 4" in result.out
    assert curve(run) == curve(three) and tensors(run, 6) == tensors(three, 6)


def test_all_damaged_is_an_end_not_a_fresh_start(run, data):
    for step in steps(run):
        (run / "checkpoints" / f"step_{step:08d}" / "manifest.json").unlink()
    result = train(run, data, expect=2, max_iters=8)
    assert len(result.errors) == 1 and "--resume=never" in result.errors[0] and steps(run) == [2, 4, 6]
    train(run, data, max_iters=2, resume="never")


@pytest.mark.quick
def test_newest_is_the_highest_step_whatever_the_file_times_say(tmp_path):
    for step, age in ((500, 1), (999, 2), (1000, 4), (2500, 3), (100_000_000, 9)):
        folder = tmp_path / "checkpoints" / f"step_{step:08d}"
        folder.mkdir(parents=True)
        os.utime(folder, (time.time() - age * 1000,) * 2)
    (tmp_path / "checkpoints" / ".step_00009999.partial").mkdir()
    assert ckpt.list_steps(str(tmp_path)) == [500, 999, 1000, 2500, 100_000_000]


@pytest.mark.quick
@pytest.mark.parametrize("keep_last, keep_every, kept", [(1, 0, [10]), (2, 0, [8, 10]), (-1, 0, [2, 4, 6, 8, 10]), (1, 4, [4, 8, 10]), (9, 0, [2, 4, 6, 8, 10])])
def test_old_checkpoints_go_as_asked(keep_last, keep_every, kept, tmp_path):
    for step in (2, 4, 6, 8, 10):
        os.makedirs(ckpt.step_folder(tmp_path, step))
    ckpt.delete_old(tmp_path, keep_last, keep_every)
    assert ckpt.list_steps(tmp_path) == kept


def test_the_best_is_kept_apart_and_whole(data, tmp_path):
    run = tmp_path / "run"
    train(run, data, max_iters=8, save_interval=1, eval_interval=1, keep_last=1, learning_rate=0.3)
    losses = {r["step"]: r["loss"] for r in records(run, "val")}
    best = ckpt.open_checkpoint(str(run / "checkpoints" / "best"))
    assert losses[best.step] == min(losses.values()) and steps(run) == [8]


@pytest.mark.full  # test_crash_points.py kills before every operation by default, test_kills.py under changing layouts
def test_killed_inside_a_save_the_next_start_finds_a_complete_step(data, tmp_path):
    """kill -9 at random moments of a run that saves all the time, until it has ended: the curve is the undisturbed one."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    settings = dict(max_iters=60, save_interval=1, keep_last=2, dropout=0.1, n_embd=192)
    train(whole, data, **{**settings, "save_interval": 60})
    kills = 0
    while True:
        job = Job(1, run, data, **settings)
        target = (ckpt.list_steps(run) or [0])[-1] + 12
        partial = lambda: any(n.endswith(".partial") for n in os.listdir(run / "checkpoints")) if (run / "checkpoints").exists() else False
        wait_for(lambda: job.process.poll() is not None or (ckpt.list_steps(run) or [0])[-1] >= target and partial())
        if job.process.poll() is not None:
            assert job.end() == 0, job.text
            break
        job.kill()
        kills += 1
        assert 1 <= len(ckpt.list_steps(run)) <= 3
    assert kills >= 3
    assert curve(run) == curve(whole) and tensors(run, 60) == tensors(whole, 60)
    assert not [n for n in os.listdir(run / "checkpoints") if n.startswith(".")]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_saves_the_last_finished_update_and_leaves_with_143(name, data, tmp_path):
    run = tmp_path / "run"
    job = Job(1, run, data, max_iters=100_000)
    job.wait_for(lambda: job.step >= 20)
    job.process.send_signal(getattr(signal, name))
    assert job.end(30) == 143 and name in job.text
    assert len(steps(run)) == 1 and max(curve(run)) == steps(run)[0] >= 20
    assert records(run, "event")[-2]["signal"] == name


def test_two_jobs_on_one_folder_the_second_is_refused_a_dead_ones_lock_is_not(data, tmp_path):
    run = tmp_path / "run"
    first = Job(1, run, data, max_iters=100_000, save_interval=10)
    first.wait_for(lambda: ckpt.list_steps(run))
    result = train(run, data, expect=2)
    assert len(result.errors) == 1 and f"process {first.process.pid}" in result.errors[0] and "--out_dir" in result.errors[0]
    assert first.process.poll() is None
    first.kill()
    assert json.loads((run / "lock").read_text())["pid"] == first.process.pid
    done = ckpt.list_steps(run)[-1]
    train(run, data, max_iters=done + 1, lr_decay_iters=100_000, save_interval=10)


def limited(bytes_at_most):
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_at_most, bytes_at_most))
    return limit


@pytest.mark.parametrize("async_save", [False, True])
def test_a_full_disk_in_a_save_leaves_the_checkpoint_before_it(async_save, run, data):
    size = os.path.getsize(run / "checkpoints" / "step_00000006" / "optimizer.safetensors")
    settings = dict(max_iters=2000, lr_decay_iters=6, save_interval=8, log_interval=50, async_save=True) if async_save else dict(max_iters=8)
    done = subprocess.run(command(run, data, **settings), cwd=ROOT, capture_output=True, text=True, preexec_fn=limited(size - 1000))
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert done.returncode == 2 and len(errors) == 1 and done.stderr.strip() == errors[0]
    assert str(run) in errors[0] and "bytes are needed" in errors[0] and "free" in errors[0]
    assert steps(run) == [2, 4, 6] and not [n for n in os.listdir(run / "checkpoints") if n.startswith(".")]
    train(run, data, max_iters=8)
    assert steps(run)[-1] == 8


def test_a_disk_too_small_is_told_before_the_first_update(data, tmp_path):
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "none", str(tmp_path)]).returncode:
        pytest.skip("needs to mount a small tmpfs")
    try:
        result = train(tmp_path / "run", data, expect=2)
        assert len(result.errors) == 1 and "a checkpoint takes" in result.errors[0] and "step 1" not in result.out
    finally:
        subprocess.run(["umount", str(tmp_path)])


def test_a_torn_metrics_line_is_cut_off(run, data):
    with open(run / "metrics.jsonl", "a") as f:
        f.write('{"kind": "train", "step": 7, "loss": 1.0, "grad_norm": 1.0, "lr": 1.0, "tokens": 1, "tokens_per_s": 1}\n{"kind": "tr')
    train(run, data, max_iters=8)
    assert sorted(curve(run)) == list(range(1, 9)) and curve(run)[7][0] != 1.0


class Evil:
    def __reduce__(self):
        return (os.system, ("touch hacked",))


def test_a_hostile_pt_file_is_refused_and_not_run(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"model": Evil(), "model_args": {}}, "ckpt.pt")
    result = train(tmp_path / "run", data, expect=2, init_from=tmp_path / "ckpt.pt")
    assert len(result.errors) == 1 and "without running code" in result.errors[0]
    assert not os.path.exists("hacked") and not os.path.exists(os.path.join(ROOT, "hacked")) and not (tmp_path / "run").exists()


@pytest.mark.quick
def test_names_that_do_not_fit_are_listed(tmp_path):
    here = {"a.weight": torch.zeros(2), "b.weight": torch.zeros(3)}
    source = lambda *shape: (shape, lambda rows: torch.ones(shape)[rows])
    with pytest.raises(UserError) as error:
        ckpt.fill(Place(), here, here, {"a.weight": source(2), "c.weight": source(1)}, "file")
    assert "lacks b.weight" in error.value.sentences[0] and "has c.weight" in error.value.sentences[1]
    with pytest.raises(UserError, match=r"b.weight has shape \(4,\), this model needs \(3,\)"):
        ckpt.fill(Place(), here, here, {"a.weight": source(2), "b.weight": source(4)}, "file")
    assert not here["a.weight"].any(), "nothing was copied"
    ckpt.fill(Place(), here, here, {"a.weight": source(2), "b.weight": source(3)}, "file")
    assert all(t.all() for t in here.values())


@pytest.mark.parametrize("spoil", ["file", "under a file", "lock", "checkpoints", "empty"])
def test_a_folder_that_cannot_be_used_is_one_sentence(spoil, data, tmp_path):
    run = tmp_path / "run"
    if spoil in ("file", "under a file"):
        run.write_text("")
        run = run / "deeper" if spoil == "under a file" else run
    elif spoil != "empty":
        run.mkdir()
        (run / "lock").mkdir() if spoil == "lock" else (run / "checkpoints").write_text("")
    result = train("" if spoil == "empty" else run, data, expect=2)
    assert len(result.errors) == 1 and result.err.strip() == result.errors[0] and "out_dir" in result.errors[0], result.err


@pytest.mark.quick
def test_a_manifest_that_points_elsewhere_is_damaged(three, tmp_path):
    path = shutil.copytree(three / "checkpoints" / "step_00000006", tmp_path / "c") / "manifest.json"
    whole = json.loads(path.read_text())
    whole.pop("sha256")
    for change in (lambda m: m["tensors"]["model"]["wte.weight"]["pieces"][0].update(file="../../../etc/passwd"), lambda m: m.update(files={}),
                   lambda m: m.update(version="1"), lambda m: m.pop("tensors"), lambda m: m["tensors"]["model"]["wte.weight"].update(pieces=[])):
        manifest = json.loads(json.dumps(whole))
        change(manifest)
        path.write_text(json.dumps({**manifest, "sha256": ckpt.json_checksum(manifest)}))
        with pytest.raises(ckpt.Damaged):
            ckpt.Checkpoint(str(tmp_path / "c"))


def test_replicas_of_one_process_agree(data, tmp_path):
    train(tmp_path / "run", data, max_iters=2, check_replicas_interval=1)
