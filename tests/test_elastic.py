"""torchrun --nnodes=1:2: a machine that is lost leaves the other going on alone, one that comes takes its share, and the bits stay the same.

Two agents on one machine stand for the two. The one that hosts the rendezvous must live: torchrun's c10d store dies with it.
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 gives every start a store of its own; without it torch 2.13's rank 0 keeps the first start's
address to itself, and an agent that has just come waits for it in vain.
"""

import json
import os
import signal
import socket
import time

import pytest

from conftest import Job, curve, processes_of, records, several, tensors
from engine import checkpoint as ckpt

RUN = dict(n_embd=192, total_batch_size=8 * 32, learning_rate=1e-3, dropout=0.1, deterministic=True, save_interval=3, log_interval=1, lr_decay_iters=60, parallel="ddp")


@pytest.fixture
def agent(data, tmp_path):
    """Starts torchrun as one of at most two machines of two processes each; nothing of them is left in the end."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    jobs = []

    def start(hosts, nodes="1:2", n=2, env=None):
        conf = f"is_host={int(hosts)},last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
        options = [f"--nnodes={nodes}", "--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}", "--rdzv_id=elastic", "--local_addr=127.0.0.1",
                   "--max-restarts=3", f"--rdzv_conf={conf}"]
        jobs.append(Job(n, tmp_path / "run", data, options, env, **{**RUN, "max_iters": 100_000}))
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill()
    for pid in processes_of(tmp_path / "run"):
        os.kill(pid, signal.SIGKILL)


OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def ranks(run):
    with open(run / "config.json", encoding="utf-8") as f:
        return json.load(f)["world_size"]


def check_bits(folder, data):
    """What was killed goes on in one process for a few updates, to where an undisturbed run comes."""
    last = ckpt.list_steps(folder / "run")[-1] + 2
    settings = {**RUN, "parallel": "auto", "max_iters": last}
    several(1, [(folder / "run", data, settings), (folder / "whole", data, settings)])
    assert curve(folder / "run") == curve(folder / "whole") and tensors(folder / "run", last) == tensors(folder / "whole", last)


def lose_one(agent, run, env):
    """Two machines train, one is lost; returns the other, which goes on alone."""
    first = agent(True, env=env)
    second = agent(False, env=env)
    first.wait_for(lambda: first.step >= 5)
    assert ranks(run) == 4
    second.kill()
    first.wait_for(lambda: first.text.count("going on from") == 1)
    reached = first.step
    first.wait_for(lambda: first.step >= reached + 4)
    assert ranks(run) == 2
    return first


@pytest.mark.full
@pytest.mark.parametrize("env", [OWN_STORE, {}], ids=["own store", "torch's shared store"])
def test_the_machine_that_is_left_goes_on_alone(env, agent, data, tmp_path):
    lose_one(agent, tmp_path / "run", env).kill()
    check_bits(tmp_path, data)


def test_a_machine_that_comes_takes_its_share_and_nothing_is_lost(agent, data, tmp_path):
    run = tmp_path / "run"
    first = lose_one(agent, run, OWN_STORE)
    second = agent(False, env=OWN_STORE)
    first.wait_for(lambda: first.text.count("going on from") == 2)
    first.wait_for(lambda: ranks(run) == 4 and first.text.rindex("\nstep ") > first.text.rindex("going on from"))
    events = [(r["event"], r["step"]) for r in records(run, "event")]
    stopped = [step for event, step in events if event == "signal"]
    assert len(stopped) == 1 and ("resumed", stopped[0]) in events, "torchrun's SIGTERM saves first"
    first.kill()
    second.kill()
    check_bits(tmp_path, data)


@pytest.mark.full
def test_one_fault_is_one_restart_where_the_machines_count_their_restarts_differently(agent, data, tmp_path):
    """A worker dies while another machine's is long at work: the one's torchrun counts a failure, the other's a change of members."""
    first, second = agent(True, nodes="2", n=1), agent(False, nodes="2", n=1)
    first.wait_for(lambda: first.step >= 5)
    busy, victim = first.workers()[0], second.workers()[0]
    os.kill(busy, signal.SIGSTOP)
    os.kill(victim, signal.SIGKILL)
    time.sleep(3)
    os.kill(busy, signal.SIGCONT)
    first.wait_for(lambda: "going on from" in first.text)
    assert first.text.count("failed (exitcode") == 1, "that of the worker that was killed"
    first.kill()
    second.kill()
    check_bits(tmp_path, data)
