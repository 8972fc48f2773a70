"""What the disk holds at every moment of a run: never fewer checkpoints than asked for once they were there, and none by halves where it fills up."""

import os
import re
import subprocess

import pytest

from conftest import TINY, Job, as_args, curve, forked, steps, tensors, train
from engine import checkpoint as ckpt

ASYNC = {"async_save": True}


def named(more):
    return " ".join(f"{k}={v}" for k, v in more.items()) or "plain"


def complete(run):
    """The steps whose checkpoints are whole; one that was deleted while it was read does not count, one that is there and damaged fails."""
    found = []
    for step in ckpt.list_steps(run):
        path = ckpt.step_folder(run, step)
        try:
            ckpt.Checkpoint(path).verify()
            found.append(step)
        except (ckpt.Damaged, OSError) as error:
            assert not os.path.exists(path), f"{path} has its name and is not complete: {error}"
    return found


@pytest.mark.parametrize("keep_last, more", [(1, {}), (1, ASYNC), (-1, {}), pytest.param(2, {}, marks=pytest.mark.full)], ids=lambda value: named(value) if isinstance(value, dict) else value)
def test_watched_all_the_time_there_is_never_less_than_was_promised(keep_last, more, data, tmp_path):
    run, looks, seen = str(tmp_path / "run"), 0, set()
    job = Job(1, run, data, **{"n_embd": 192, "max_iters": 40, "save_interval": 1, "keep_last": keep_last, **more})
    try:
        while job.process.poll() is None:
            listed, whole = ckpt.list_steps(run), complete(run)
            if seen:
                # one may go while it is read
                assert whole or complete(run) or complete(run), "there was a complete checkpoint, and there is none"
                assert keep_last > 0 or set(listed) >= seen, "keep_last=-1 keeps all"
                assert len(listed) >= min(len(seen), keep_last)
                assert keep_last < 0 or len(listed) <= keep_last + 1
            looks, seen = looks + 1, seen | set(whole)
    finally:
        job.kill()
    assert job.process.returncode == 0 and looks > 20 and len(seen) > 10, f"{looks} looks saw {seen}"
    assert steps(run) == list(range(1, 41))[-keep_last if keep_last > 0 else 0:]


@pytest.mark.parametrize("n, layout, more", [(1, {}, {}), (2, {"parallel": "fsdp"}, {}), (2, {"parallel": "fsdp"}, ASYNC)], ids=["single", "fsdp2", "fsdp2-async"])
def test_a_disk_that_fills_up_in_a_save_keeps_what_was_complete(n, layout, more, data, tmp_path):
    disk, run = tmp_path / "disk", tmp_path / "disk" / "run"
    disk.mkdir()
    settings = {**layout, **more, "max_iters": 8, "save_interval": 2, "keep_last": -1, "deterministic": True}
    args = ["tests/empty_config.py", f"--out_dir={run}", f"--dataset={data}", *as_args({**TINY, **settings})]
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2200k", "none", str(disk)]).returncode:  # a checkpoint takes 860 KB
        pytest.skip("needs to mount a small tmpfs")
    try:
        result = forked(n, "train.py", *args)
        errors = [line for line in result.err.splitlines() if line.startswith("error:")]
        assert len(errors) == 1 and (result.code == 2 if n == 1 else result.code), result.err
        assert re.search(rf"no room to write {run}/\S+: .*, [\d,]+ bytes are needed, [\d,]+ bytes are free", errors[0]), errors[0]
        assert complete(run) == [2, 4] and not [f for f in os.listdir(run / "checkpoints") if f.startswith(".")]
        subprocess.run(["mount", "-o", "remount,size=9m", str(disk)], check=True)
        result = forked(n, "train.py", *args)
        assert result.code == 0 and "step_00000004: update 4" in result.out, result.err
        train(tmp_path / "whole", data, **{**settings, "parallel": "auto"})
        assert curve(run) == curve(tmp_path / "whole") and tensors(run, 8) == tensors(tmp_path / "whole", 8)
    finally:
        subprocess.run(["umount", str(disk)])
