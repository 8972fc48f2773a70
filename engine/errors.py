"""How the project says no: one sentence on stderr, and an exit code that scripts can read."""

import contextlib
import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn

from engine import voice

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_SIGNAL = 1, 2, 130, 143


class UserError(Exception):
    """Something a person gave us is wrong: what was given, what was expected, what would work.

    Several faults found together are told together, a line each.
    """

    def __init__(self, *sentences: str):
        super().__init__("\n".join(sentences))
        self.sentences = sentences


class Recoverable(UserError):
    """A fault that is told as a UserError is, and that starting again from the last checkpoint may cure."""


def is_full_disk(error: BaseException) -> bool:
    """True where the operating system says that no more can be written: disk, quota or file-size limit."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def full_disk(path: str, needed: int | None, error: OSError) -> UserError:
    """The UserError for a write of `needed` bytes (None where not known) to `path` that did not fit."""
    folder = path
    while not os.path.isdir(folder):
        folder = os.path.dirname(os.path.abspath(folder))
    free = shutil.disk_usage(folder).free
    need = "" if needed is None else f", {needed:,} bytes are needed"
    return UserError(f"no room to write {path}: {error.strerror}{need}, {free:,} bytes are free there; "
                     "free some space or choose another folder; what was complete before is untouched")


@contextlib.contextmanager
def full_disk_told(path: str | None = None, needed: int | None = None) -> Iterator[None]:
    """Turns a full disk met inside into full_disk()'s sentence, about `path` (None: the file that the system names)."""
    try:
        yield
    except OSError as error:
        if is_full_disk(error):
            raise full_disk(path or error.filename or os.getcwd(), needed, error) from error
        raise


def tell(error: UserError) -> None:
    """Prints an error's sentences on stderr, a line each."""
    for sentence in error.sentences:
        voice.warn(f"error: {sentence}")


def run_as_script(main: Callable[[], int | None]) -> NoReturn:
    """Runs main() as a program: a UserError is printed as `error: ...` lines and ends with exit code 2."""
    try:
        code = main()
    except UserError as error:
        tell(error)
        code = EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = EXIT_INTERRUPTED
    except BrokenPipeError:  # `python sample.py | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_FAILED
    sys.stdout.flush()
    sys.exit(code or 0)
