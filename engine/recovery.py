"""Failure recovery: a run that is told to stop, a rank that fails, faults told once, and two jobs kept off one folder.

Imports nothing heavy: a restarted worker whose fault has been told is gone before torch is loaded.
"""

import contextlib
import datetime
import json
import os
import signal
import socket
import sys
import tempfile
import time
import traceback

from engine.errors import EXIT_BAD_INPUT, EXIT_FAILED, UserError, full_disk_told, tell

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


def fault_mark():
    """A file that says that this torchrun's job has told its fault: torchrun starts the workers again, they need not say it again.
    None where there is no torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    try:
        with open(f"/proc/{os.getppid()}/stat") as f:
            started = f.read().rsplit(")", 1)[1].split()[19]  # process ids come again, start times do not
    except OSError:
        started = ""
    return os.path.join(tempfile.gettempdir(), f"boringgpt-{os.getuid()}-{os.getppid()}-{started}.fault")


def leave_if_told():
    """Ends a worker that torchrun has started again after a fault of configuration, which a restart cannot cure."""
    mark = fault_mark()
    if mark and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and os.path.exists(mark):
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == os.environ.get("TORCHELASTIC_MAX_RESTARTS") and os.environ.get("LOCAL_RANK") == "0":
            with contextlib.suppress(OSError):
                os.unlink(mark)
        os._exit(EXIT_BAD_INPUT)


@contextlib.contextmanager
def told_once(place, where):
    """Around a rank's whole work: of a fault that all ranks share one tells; of a rank that fails, that rank alone, at once and
    without collectives, since the others may wait in one. where() says what it was at, such as "step 3"."""
    try:
        with full_disk_told():
            yield
    except UserError as error:
        if place.store is None:
            raise
        if mark := fault_mark():
            with contextlib.suppress(OSError), open(mark, "x"):
                pass
        if place.speaks:
            tell(error)
        with contextlib.suppress(Exception):  # torchrun ends all ranks once one has left: rank 0 must have spoken by then
            if place.speaks:
                place.store.set("told", "1")
            place.store.wait(["told"], datetime.timedelta(seconds=10))
        os._exit(EXIT_BAD_INPUT)
    except BaseException as error:
        if place.store is None or isinstance(error, SystemExit):
            raise
        first = True
        with contextlib.suppress(Exception):  # the store may have died with its host
            first = place.store.add("failed", 1) == 1
        if first:
            lines = f"error: rank {place.rank} on {place.host} failed at {where()}:\n{traceback.format_exc()}"
            os.write(sys.stderr.fileno(), lines.encode())  # one write: other ranks' lines do not come in between
        os._exit(EXIT_FAILED)


@contextlib.contextmanager
def usable(run):
    """Around work on a run's folder: what the operating system refuses there is the user's to mend."""
    try:
        with full_disk_told():
            yield
    except OSError as error:
        raise UserError(f"out_dir={run} cannot be used: {error.strerror}: {error.filename}; give another --out_dir, or move what is in the way") from error


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
