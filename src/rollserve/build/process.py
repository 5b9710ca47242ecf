"""What every process of ours sets up for itself once, before its event loop starts."""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Sequence
from importlib import import_module

SWITCH_INTERVAL_S = 0.001
"""Threads decode payloads beside the loop; with Python's default it waits 5 ms for each of them."""

GC_THRESHOLDS = (20_000, 50, 100)
"""Thousands of sessions are many live objects: full collections are rare, young ones cheap."""


def tune_process(preload: Sequence[str] = ()) -> None:
    """As many open files as allowed (a sandbox takes five), short thread switches, and a collector that
    does not walk what was imported. ``preload`` are modules that would else be imported, and hold up
    everything, under the first request that needs them."""
    for module in preload:
        import_module(module)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
