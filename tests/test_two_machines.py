"""Two machines: network namespaces joined by a cable, torchrun on each with c10d rendezvous, with and without a shared folder."""

import os
import signal
import subprocess
import sys
import time

import pytest

from conftest import HOSTS, ROOT, TINY, as_args, curve, several, steps, tensors


def start(machines, host, data, out_dir, settings, options=()):
    """torchrun on one of the two machines, with the words of the README."""
    name, interface = machines[host]
    command = [sys.executable, "-u", "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", f"--rdzv_endpoint={HOSTS['a']}:29400",
               "--rdzv_id=two", f"--rdzv_conf=is_host={int(host == 'a')}", f"--local_addr={HOSTS[host]}", *options, "train.py", "tests/empty_config.py",
               f"--out_dir={out_dir}", f"--dataset={data}", *as_args({**TINY, **settings})]
    env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    return subprocess.Popen(["ip", "netns", "exec", name, *command], cwd=ROOT, env={**env, "GLOO_SOCKET_IFNAME": interface},
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)


def run_both(machines, data, out_dirs, settings):
    jobs = [start(machines, h, data, out_dirs[h], settings) for h in HOSTS]
    try:
        outs = [job.communicate(timeout=120)[0] for job in jobs]
    finally:
        for job in jobs:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
    assert [job.returncode for job in jobs] == [0, 0], "\n".join(outs)
    return outs


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_machines_draw_the_curve_of_one(parallel, machines, data, tmp_path):
    settings = dict(max_iters=8, deterministic=True, dropout=0.1)
    outs = run_both(machines, data, dict.fromkeys("ab", tmp_path / "run"), {**settings, "parallel": parallel})
    several(1, [(tmp_path / "one", data, settings)])
    assert curve(tmp_path / "run") == curve(tmp_path / "one") and tensors(tmp_path / "run", 8) == tensors(tmp_path / "one", 8)
    assert sum("step 8/8" in out for out in outs) == 1, "one of all ranks speaks"


def test_without_a_shared_folder_ddp_is_killed_and_goes_on_from_rank_0s_folder(machines, data, tmp_path):
    settings = dict(max_iters=60, lr_decay_iters=60, deterministic=True, parallel="ddp", save_interval=5, log_interval=5)
    folders = {h: tmp_path / h / "run" for h in HOSTS}
    jobs = [start(machines, h, data, folders[h], settings) for h in HOSTS]
    deadline = time.time() + 90
    while not any((f / "checkpoints" / "step_00000010").exists() for f in folders.values()):
        assert time.time() < deadline and all(job.poll() is None for job in jobs)
        time.sleep(0.02)
    for job in jobs:  # both machines lose power
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    subprocess.run(["pkill", "-9", "-f", str(tmp_path)])
    home = next(f for f in folders.values() if (f / "checkpoints").exists())
    assert steps(home)[-1] < 60
    outs = run_both(machines, data, folders, settings)
    if not (home / "checkpoints" / "step_00000060").exists():  # ranks are dealt anew at each rendezvous
        pytest.fail("rank 0 moved to the other machine: " + "\n".join(outs))
    several(1, [(tmp_path / "one", data, {k: v for k, v in settings.items() if k != "parallel"})])
    assert curve(home) == curve(tmp_path / "one") and tensors(home, 60) == tensors(tmp_path / "one", 60)
