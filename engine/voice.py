"""What a process says, a sentence a line, and on a terminal the bar under it that is drawn again and again.

A process has one terminal, whichever of its threads speaks: so there is one bar, and nothing is printed before it is taken off.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tqdm import tqdm

_lock = threading.RLock()  # a signal's handler may speak while its own thread does
_bar: tqdm | None = None


def say(sentence: str) -> None:
    """Prints a line on stdout, at once."""
    with _lock:
        take_off_bar()
        print(sentence, flush=True)


def warn(sentence: str) -> None:
    """Prints a line on stderr, at once."""
    with _lock:
        take_off_bar()
        print(sentence, file=sys.stderr, flush=True)


def draw_bar(step: int, most: int, text: str) -> None:
    """Draws the bar at step of most with text beside it, ten times a second at most; stdout must be a terminal."""
    global _bar
    with _lock:
        if _bar is None:
            from tqdm import tqdm

            _bar = tqdm(total=most, initial=step, file=sys.stdout, leave=False, dynamic_ncols=True, miniters=1, bar_format="{percentage:3.0f}% |{bar}| {desc}")
        _bar.set_description_str(text, refresh=False)
        _bar.update(step - _bar.n)
        sys.stdout.write("\r")  # what another process prints overwrites it


@contextlib.contextmanager
def bar_at_work() -> Iterator[None]:
    """Around the work that the bar shows: it is gone however that ends."""
    global _bar
    try:
        yield
    finally:
        with _lock:
            if _bar is not None:
                _bar.close()
                _bar = None


def take_off_bar() -> None:
    """Takes the bar off the terminal, until it is drawn again."""
    with _lock:
        if _bar is not None:
            _bar.clear()
