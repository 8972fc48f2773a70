"""Starts scripts of the project as forks of one process that has imported what they import: a start takes tenths of a second, not seconds.

A line on stdin asks for a group of processes, {"n": 2, "words": ["train.py", ...], "env": {...}, "out": file, "err": file}; a line on stdout tells
its exit code when it has ended. Each fork runs the script from its first line as `python SCRIPT` does, among the variables that torchrun sets.
This process computes nothing and has no threads, which no fork would inherit.
"""

import atexit
import datetime
import gc
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[0] = ROOT

import matplotlib.backends.backend_agg  # what the runs would import one after the other
import matplotlib.figure  # noqa: F401
import torch
import torch.distributed.fsdp
import torch.distributed.tensor.parallel  # noqa: F401

import engine.recovery
import sample  # noqa: F401
import train  # noqa: F401


def host_store(pipe):
    """What torchrun is to its workers: the key-value store. Tells its port, and waits to be killed."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=datetime.timedelta(seconds=60))
    os.write(pipe, str(store.port).encode())
    while True:
        signal.pause()


def run(words, env, out, err):
    os.environ.clear()
    os.environ.update(env)
    for stream, path in enumerate((os.devnull, out, err)):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(fd, stream)
        os.close(fd)
    if "RANK" in env:
        torch.set_num_threads(1)  # torchrun's OMP_NUM_THREADS comes too late here
    engine.recovery.STARTED = time.monotonic()
    sys.argv = words
    sys.path[0] = os.path.dirname(os.path.join(ROOT, words[0]))
    try:
        runpy.run_path(os.path.join(ROOT, words[0]), run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for what is no daemon
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)  # to take the interpreter apart would copy all of its memory first


def wait_for_all(ranks):
    """The exit code of the first that fails, else 0; the others wait for it in vain, and are killed."""
    code = 0
    while ranks:
        pid, status = os.wait()
        ranks.discard(pid)
        if status and not code:
            code = os.waitstatus_to_exitcode(status)
            time.sleep(2)  # they may be about to leave by themselves
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    return code


def main():
    gc.collect()
    gc.freeze()  # a collection in a fork would copy what it looks at
    while line := sys.stdin.readline():
        asked = json.loads(line)
        n, env, host = asked["n"], asked["env"], None
        if n > 1:
            read, write = os.pipe()
            if not (host := os.fork()):
                host_store(write)
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.read(read, 9).decode(), "WORLD_SIZE": str(n), "TORCHELASTIC_USE_AGENT_STORE": "True"}
            os.close(read)
            os.close(write)
        ranks = set()
        for rank in range(n):
            if not (pid := os.fork()):
                run(asked["words"], env | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if n > 1 else {}), asked["out"], asked["err"])
            ranks.add(pid)
        code = wait_for_all(ranks)
        if host:
            os.kill(host, signal.SIGKILL)
            os.waitpid(host, 0)
        print(code, flush=True)


main()
