"""The signals that ask a process to end, so that all who clean up at one of them do so at each.

The kernel sends SIGHUP when the terminal is closed. Who was started to outlive it (``nohup``, a daemon's
starter) ignores it, and goes on doing so.
"""

from __future__ import annotations

import signal


def asked_by() -> list[signal.Signals]:
    """SIGTERM, and SIGHUP unless this process was started to ignore it."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGTERM] if ignored else [signal.SIGTERM, signal.SIGHUP]


def end_as_interrupted() -> None:
    """From now on each of them raises ``KeyboardInterrupt``, as Ctrl-C does. In the main thread."""
    for number in asked_by():
        signal.signal(number, signal.default_int_handler)
