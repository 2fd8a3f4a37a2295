"""An interrupt that waits until what it would lose is saved."""

import os
import signal
import sys
import threading
from typing import Any, Self

import jax

_NOTICE = b"\nthe rounds that run are finished and saved; once more stops at once\n"


class HeldInterrupt:
    """Context manager: Ctrl-C sets `came`, and raises KeyboardInterrupt at the end.

    A second one is not held, nor is any where nothing is to be saved, another handler
    is in charge, outside the main thread, or where other processes would wait.
    """

    def __init__(self, enabled: bool):
        self.came = False
        self._held = (
            enabled
            and threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
            and jax.process_count() == 1
        )

    def _note(self, *_: Any) -> None:
        self.came = True
        if sys.stderr and sys.stderr.isatty():
            # Not by sys.stderr, in whose own writing this may come.
            os.write(sys.stderr.fileno(), _NOTICE)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def __enter__(self) -> Self:
        if self._held:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if self._held:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.came and error is None:
            raise KeyboardInterrupt
