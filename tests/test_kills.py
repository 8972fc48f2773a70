"""Kill any process, or the whole job, at any instant: it goes on from the last complete checkpoint to the undisturbed run's bits."""

import os
import random
import re
import signal
import subprocess
import time

import pytest

from conftest import Job, alive, curve, on_machine, processes_of, records, several, tensors, wait_for
from engine import checkpoint as ckpt

LAYOUTS = {  # name: (processes, settings)
    "single": (1, {}), "ddp2": (2, dict(parallel="ddp")), "fsdp2": (2, dict(parallel="fsdp")), "fsdp4": (4, dict(parallel="fsdp")),
    "hsdp2x2": (4, dict(parallel="fsdp", dp_replicate=2)),
}
# Wide enough that a save takes some time, and all of its numbers fixed: deterministic=True draws one curve under every layout.
RUN = dict(n_embd=192, total_batch_size=8 * 32, learning_rate=1e-3, dropout=0.1, deterministic=True, save_interval=3, keep_last=2, log_interval=1)
ASYNC = {"async_save": True}
EXTRA = [{}, pytest.param(ASYNC, marks=pytest.mark.full)]


def named(more):
    return " ".join(f"{k}={v}" for k, v in more.items()) or "plain"


def undisturbed(folder, data, max_iters):
    several(1, [(folder / "whole", data, {**RUN, "max_iters": max_iters, "save_interval": max_iters})])
    return folder / "whole"


def newest(run):
    return (ckpt.list_steps(run) or [0])[-1]


def in_a_save(run):
    try:
        return any(n.startswith(".step") and n.endswith(".partial") for n in os.listdir(os.path.join(run, "checkpoints")))
    except FileNotFoundError:
        return False


def reached(run):
    """The last update in metrics.jsonl, whose last line may be torn."""
    try:
        with open(os.path.join(run, "metrics.jsonl"), encoding="utf-8") as f:
            return max([int(n) for n in re.findall(r'^{"kind": "train", "step": (\d+),', f.read(), re.M)], default=0)
    except FileNotFoundError:
        return 0


def check_goes_on_from(job, step):
    """The job says that it goes on from this step, or from none at all."""
    said = re.findall(r"^going on from .*: update ([\d,]+),", job.text, re.M)
    assert [int(s.replace(",", "")) for s in said] == ([step] if step else []), job.text[-3000:]


def kill_one_round(job, run, rng, who, when, already):
    """Waits for the moment, kills, and sees to it that nothing is left of the job; returns the newest step then."""
    goal = already + rng.randint(1, 6)
    if when == "starting":
        time.sleep(rng.random() * 5)
    else:
        job.wait_for(lambda: job.step >= goal)
        if when == "saving":
            job.wait_for(lambda: in_a_save(run))
        else:
            time.sleep(rng.random() * 0.3)
    workers = job.workers()
    if who == "all":
        job.kill()
    else:
        victim = rng.choice(workers)
        os.kill(victim, signal.SIGKILL)
        assert job.end(90) != 0
    for pid in processes_of(run):  # workers whose torchrun was killed before it was their turn
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not processes_of(run))
    return newest(run)


def kill_and_go_on(run, data, rounds, rng, max_iters, more):
    """rounds: [(layout, who, when)]. The run is killed in each, the last start makes it whole; returns the number of kills."""
    at_least, kills = 0, 0
    for layout, who, when in rounds:
        n, settings = LAYOUTS[layout]
        found = newest(run)
        job = Job(n, run, data, **{**RUN, **settings, **more, "max_iters": max_iters})
        started = time.time()
        try:
            now = kill_one_round(job, run, rng, who, when, found)
        finally:
            job.kill()
        print(f"{layout}: {who} killed while {when} at update {reached(run)}, {time.time() - started:.1f} s after the start; the newest checkpoint was {found}, is {now}")
        kills += 1
        if job.step:
            check_goes_on_from(job, found)
        assert now >= at_least, "a checkpoint is gone"
        for step in ckpt.list_steps(run):
            ckpt.open_checkpoint(ckpt.step_folder(run, step))
        behind = RUN["save_interval"] * (2 if more.get("async_save") else 1)
        assert reached(run) - now <= behind, f"{reached(run) - now} updates are lost, {behind} were promised at most"
        at_least = now
    job = Job(2, run, data, **{**RUN, "parallel": "fsdp", **more, "max_iters": max_iters})
    assert job.end() == 0, job.text[-5000:]
    check_goes_on_from(job, at_least)
    return kills


def check_same(run, whole):
    last = max(curve(whole))
    assert curve(run) == curve(whole) and tensors(run, last) == tensors(whole, last)
    assert not [n for n in os.listdir(os.path.join(run, "checkpoints")) if n.startswith(".")] and not processes_of(run)


@pytest.mark.parametrize("more", EXTRA, ids=named)
def test_killed_again_and_again_under_changing_layouts_the_bits_are_the_undisturbed_runs(more, data, tmp_path):
    rounds = [("single", "all", "saving"), ("ddp2", "one", "training"), ("fsdp2", "all", "saving"), ("fsdp4", "one", "training"), ("hsdp2x2", "all", "training")]
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    assert kill_and_go_on(tmp_path / "run", data, rounds, random.Random(seed), 40, more) == len(rounds)
    check_same(tmp_path / "run", undisturbed(tmp_path, data, 40))


@pytest.mark.full
@pytest.mark.parametrize("more", EXTRA, ids=named)
@pytest.mark.parametrize("seed", [1, 2])
def test_fifty_kills(seed, more, data, tmp_path):
    rng = random.Random(seed)
    rounds = [(rng.choice(list(LAYOUTS)), rng.choice(["all", "one"]), rng.choice(["training", "training", "saving", "saving", "starting"])) for _ in range(50)]
    assert kill_and_go_on(tmp_path / "run", data, rounds, rng, 400, more) == 50
    check_same(tmp_path / "run", undisturbed(tmp_path, data, 400))


@pytest.mark.parametrize("more", [ASYNC, pytest.param({}, marks=pytest.mark.full)], ids=named)
def test_torchrun_starts_killed_workers_again_and_the_bits_are_the_undisturbed_runs(more, data, tmp_path):
    run, rng = tmp_path / "run", random.Random(7)
    job = Job(2, run, data, ["--standalone", "--max-restarts=3"], **{**RUN, "parallel": "fsdp", **more, "max_iters": 36})
    try:
        for kills in range(1, 4):
            goal = reached(run) + rng.randint(4, 7)
            job.wait_for(lambda: job.step >= goal)
            os.kill(rng.choice(job.workers()), signal.SIGKILL)
            started, at = time.time(), reached(run)
            job.wait_for(lambda: job.text.count("going on from") == kills)
            print(f"killed at update {at}, it went on after {time.time() - started:.1f} s")
        assert job.end() == 0, job.text[-5000:]
    finally:
        job.kill()
    went_on = [r["step"] for r in records(run, "event") if r["event"] == "resumed"]
    assert went_on == sorted(went_on) and len(went_on) == 3
    check_same(run, undisturbed(tmp_path, data, 36))


def working(job):
    """Its worker processes that are alive: one that has left and that torchrun has not asked for yet is not."""
    return [pid for pid in job.workers() if pid != job.process.pid and alive(pid)]


def two_machines(machines, data, run, trouble, rng, more):
    """One start on both machines, ended by killing all that runs on one of them, by pulling the cable, or by itself; returns what it said."""
    settings = {**RUN, "parallel": rng.choice(["ddp", "fsdp"]), **more, "max_iters": 30, "collective_seconds": 5}
    found = newest(run)
    jobs = {h: on_machine(machines, h, data, run, **settings) for h in "ab"}
    said = lambda: jobs["a"].text + jobs["b"].text
    name, interface = machines["b"]
    try:
        if trouble:
            goal = found + rng.randint(4, 6)
            jobs["a"].wait_for(lambda: f"\nstep {goal}/" in said())
            started = time.time()
            if trouble == "cable":
                subprocess.run(["ip", "-n", name, "link", "set", interface, "down"], check=True)
            else:
                jobs[trouble].kill()
            wait_for(lambda: not working(jobs["a"]) and not working(jobs["b"]), 40)
            print(f"{trouble} at update {reached(run)}: all had left after {time.time() - started:.0f} s; the newest checkpoint was {found}, is {newest(run)}")
        else:
            assert [job.end() for job in jobs.values()] == [0, 0], said()[-5000:]
    finally:
        for job in jobs.values():  # torchrun itself waits long for a machine that is gone
            job.kill()
        subprocess.run(["ip", "-n", name, "link", "set", interface, "up"])
    wait_for(lambda: not processes_of(run))
    assert f"going on from {ckpt.step_folder(run, found)}" in said() if found else "going on from" not in said()
    assert reached(run) - newest(run) <= RUN["save_interval"] * (2 if more.get("async_save") else 1)
    return said()


@pytest.mark.full
@pytest.mark.parametrize("more", EXTRA, ids=named)
def test_one_of_two_machines_is_killed(more, machines, data, tmp_path):
    rng = random.Random(11)
    for trouble in ("a", "b", "b", "a", "b", None):
        two_machines(machines, data, tmp_path / "run", trouble, rng, more)
    check_same(tmp_path / "run", undisturbed(tmp_path, data, 30))


@pytest.mark.full
@pytest.mark.parametrize("more", EXTRA, ids=named)
def test_both_sides_of_a_pulled_cable_say_so_and_leave(more, machines, data, tmp_path):
    rng = random.Random(12)
    for _ in range(2):
        said = two_machines(machines, data, tmp_path / "run", "cable", rng, more)
        assert "error: rank 0 on" in said and "error: rank 1 on" in said
    two_machines(machines, data, tmp_path / "run", None, rng, more)
    check_same(tmp_path / "run", undisturbed(tmp_path, data, 30))
