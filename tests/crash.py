"""Runs of train.py that watch what they do to their folder: killed before each operation on it, or seen through a power cut's eyes.

    crash.py '{"watch": "kill", "argv": [...], "home": folder, "start": run to copy or null, "inside": "checkpoints"}'
    crash.py '{"watch": "sync", "argv": [...], "home": folder}'

train is imported once; every run is a fork of this process, with a hook on all that Python does to files. One JSON line a run.
"""

import hashlib
import json
import os
import shutil
import signal
import sys
import traceback

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import matplotlib.backends.backend_agg  # what the runs would import one after the other
import matplotlib.figure  # noqa: F401

import train
from engine import checkpoint as ckpt

CHANGES = {"open": "write", "os.mkdir": "mkdir", "os.rename": "rename", "os.remove": "remove", "os.rmdir": "rmdir", "os.link": "link"}


def at(path, dir_fd=-1):
    """The absolute path of what an audit event names, which may lie relative to an open folder."""
    path = os.fsdecode(path)
    return os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}") if dir_fd != -1 else os.getcwd(), path)


def watch(run, before):
    """Calls before(what, path, path it gets) ahead of everything this process is about to change in a run's folder, and of every sync."""
    run, fsync = os.path.realpath(run) + os.sep, os.fsync

    def audit(event, args):
        if event not in CHANGES or isinstance(args[0], int) or event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        two = event in ("os.rename", "os.link")
        first = at(args[0], args[2 if two else -1] if event != "open" else -1)
        second = at(args[1], args[3]) if two else None
        if first.startswith(run) or second and second.startswith(run):
            before(CHANGES[event], first, second)

    def watched_fsync(fd):
        path = os.readlink(f"/proc/self/fd/{fd if isinstance(fd, int) else fd.fileno()}")
        if (path + os.sep).startswith(run):
            before("sync", path, None)
        fsync(fd)

    os.fsync = watched_fsync
    sys.addaudithook(audit)


def forked(argv, log, prepare=lambda: None, finish=lambda: None):
    """A run of train.py in a fork; its status as os.waitpid gives it."""
    if pid := os.fork():
        return os.waitpid(pid, 0)[1]
    code = 1
    try:
        for stream in (1, 2):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), stream)
        prepare()
        code = train.main(argv)
        finish()
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def complete_steps(run):
    found = []
    for step in ckpt.list_steps(run):
        try:
            ckpt.Checkpoint(ckpt.step_folder(run, step)).verify()
            found.append(step)
        except ckpt.Damaged:
            pass
    return found


def kill_everywhere(argv, home, start=None, inside=""):
    """For k = 1, 2, ... a run killed before its k-th operation under run/<inside>, then the same command again to its end."""
    k = status = 1
    while status:
        run, log, met = (os.path.join(home, f"{k:04d}{end}") for end in ("", ".log", ".met"))
        if start:
            shutil.copytree(start, run)
        count = [0]

        def before(what, path, target):
            count[0] += os.path.relpath(target or path, run).startswith(inside)
            if count[0] == k:
                with open(met, "w") as f:
                    f.write(f"{what} {os.path.relpath(target or path, run)}")
                os.kill(os.getpid(), signal.SIGKILL)

        status = forked([*argv, f"--out_dir={run}"], log, lambda: watch(run, before))
        told = {"run": run, "log": log, "signal": status & 0x7f, "code": status >> 8, "steps": ckpt.list_steps(run), "complete": complete_steps(run)}
        if status:
            with open(met) as f:
                told["before"] = f.read()
            told["code"] = forked([*argv, f"--out_dir={run}"], log) >> 8
        print(json.dumps(told), flush=True)
        k += 1


def see_syncs(argv, home):
    """One run; prints every renaming and removal in its folder, each with what a power cut just then would find there."""
    run, told = os.path.join(home, "run"), os.path.join(home, "told.json")
    synced, seen, curve = {}, [], [0]  # inode: content as last synced; the last update in metrics.jsonl as last synced

    def content(path):
        if os.path.isdir(path):
            return sorted((name, os.lstat(os.path.join(path, name)).st_ino) for name in os.listdir(path))
        with open(path, "rb") as f:
            return hashlib.sha256(f.read()).hexdigest()

    def on_disk(path):
        """Of a file or folder: whether what it holds now is what was last synced."""
        return synced.get(os.stat(path).st_ino) == content(path)

    def before(what, path, target):
        if what == "sync":
            synced[os.stat(path).st_ino] = content(path)
            if os.path.basename(path) == "metrics.jsonl":
                with open(path) as f:
                    curve[0] = max([r["step"] for r in map(json.loads, f) if r["kind"] == "train"], default=0)
        if what not in ("rename", "remove", "rmdir") or not os.path.exists(path):
            return
        folder = os.path.dirname(path)
        inside = [path, *(os.path.join(path, n) for n in (os.listdir(path) if os.path.isdir(path) else []))]
        seen.append({"what": what, "path": os.path.relpath(path, run), "target": target and os.path.relpath(target, run),
                     "names on disk": [name for name, _ in synced.get(os.stat(folder).st_ino, [])],
                     "not on disk": [os.path.relpath(p, path) for p in inside if not on_disk(p)],
                     "curve on disk": curve[0]})
        gone = target if what == "rename" else path
        if os.path.exists(gone) and (os.path.isdir(gone) or os.stat(gone).st_nlink == 1):
            synced.pop(os.stat(gone).st_ino, None)  # the number may come again

    def finish():
        with open(told, "w") as f:
            json.dump(seen, f)

    status = forked([*argv, f"--out_dir={run}"], os.path.join(home, "log"), lambda: watch(run, before), finish)
    if status:
        with open(os.path.join(home, "log")) as f:
            sys.exit(f.read())
    with open(told) as f:
        print(f.read())


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    {"kill": kill_everywhere, "sync": see_syncs}[asked.pop("watch")](**asked)
