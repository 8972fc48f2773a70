"""What happens when a run is told to stop, and how two jobs are kept off one folder."""

import json
import os
import signal
import socket
import time

from engine.errors import UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


class StopSignal:
    """SIGTERM, SIGINT and SIGUSR1 (Slurm's warning) ask the loop to save and leave; a second SIGINT leaves at once."""

    def __init__(self):
        self.name = None
        for name in ("SIGTERM", "SIGINT", "SIGUSR1"):
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), self._note)

    def _note(self, number, frame):
        if self.name and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name

    def __bool__(self):
        return self.name is not None


class RunLock:
    """One job a run folder. The kernel drops the lock when its holder dies, so a dead job's lock file holds nobody up."""

    STALE_AFTER = 600  # seconds without a sign of life, on file systems without locks

    def __init__(self, out_dir):
        self.path = os.path.join(out_dir, "lock")
        self.file = open(self.path, "a+")
        try:
            if fcntl is None:
                raise OSError("no locks on this system")
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a record lock: NFS knows it too, no child inherits it
        except (BlockingIOError, PermissionError):
            self._refuse()
        except OSError:
            holder = self._holder()
            alive = time.time() - os.path.getmtime(self.path) < self.STALE_AFTER
            if holder and alive and not (holder["host"] == socket.gethostname() and not _runs(holder["pid"])):
                self._refuse()
        self.touch()

    def touch(self):
        """Says who holds it, and that the holder lives."""
        self.file.seek(0)
        self.file.truncate()
        json.dump({"host": socket.gethostname(), "pid": os.getpid()}, self.file)
        self.file.flush()

    def release(self):
        self.file.seek(0)
        self.file.truncate()  # the empty file stays: deleting it would race with a job that has just opened it
        self.file.close()

    def _holder(self):
        self.file.seek(0)
        try:
            return json.load(self.file)
        except ValueError:
            return None

    def _refuse(self):
        holder = self._holder()
        who = f"process {holder['pid']} on {holder['host']}" if holder else "another process"
        raise UserError(f"{os.path.dirname(self.path)} is in use by {who}: stop that job, or give another --out_dir")


def _runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
