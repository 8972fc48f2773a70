"""Two machines: network namespaces joined by a cable, torchrun on each with c10d rendezvous, with and without a shared folder."""

import os
import signal

import pytest

from conftest import HOSTS, curve, on_machine, processes_of, several, steps, tensors, wait_for


def run_both(machines, data, out_dirs, settings):
    jobs = [on_machine(machines, h, data, out_dirs[h], **settings) for h in HOSTS]
    try:
        assert [job.end(120) for job in jobs] == [0, 0], "\n".join(job.text for job in jobs)
    finally:
        for job in jobs:
            job.kill()
    return jobs[0].text  # of both, where they share a folder


@pytest.mark.parametrize("parallel", [pytest.param("ddp", marks=pytest.mark.full), "fsdp"])  # below, DDP has no shared folder
def test_two_machines_draw_the_curve_of_one(parallel, machines, data, tmp_path):
    settings = dict(max_iters=8, deterministic=True, dropout=0.1)
    said = run_both(machines, data, dict.fromkeys(HOSTS, tmp_path / "run"), {**settings, "parallel": parallel})
    several(1, [(tmp_path / "one", data, settings)])
    assert curve(tmp_path / "run") == curve(tmp_path / "one") and tensors(tmp_path / "run", 8) == tensors(tmp_path / "one", 8)
    assert said.count("step 8/8") == 1, "one of all ranks speaks"


def test_without_a_shared_folder_ddp_is_killed_and_goes_on_from_rank_0s_folder(machines, data, tmp_path):
    settings = dict(max_iters=60, lr_decay_iters=60, deterministic=True, parallel="ddp", save_interval=5, log_interval=5)
    folders = {h: tmp_path / f"run_{h}" for h in HOSTS}
    jobs = [on_machine(machines, h, data, folders[h], **settings) for h in HOSTS]
    jobs[0].wait_for(lambda: any((f / "checkpoints" / "step_00000010").exists() for f in folders.values()))
    for job in jobs:  # both machines lose power
        job.kill()
    for pid in [pid for f in folders.values() for pid in processes_of(f)]:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not any(map(processes_of, folders.values())))
    home = next(f for f in folders.values() if (f / "checkpoints").exists())
    assert steps(home)[-1] < 60
    run_both(machines, data, folders, settings)
    if not (home / "checkpoints" / "step_00000060").exists():  # ranks are dealt anew at each rendezvous
        pytest.fail("rank 0 moved to the other machine")
    several(1, [(tmp_path / "one", data, {k: v for k, v in settings.items() if k != "parallel"})])
    assert curve(home) == curve(tmp_path / "one") and tensors(home, 60) == tensors(tmp_path / "one", 60)
