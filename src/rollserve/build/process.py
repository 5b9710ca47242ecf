"""What every process of ours sets up for itself once, before its event loop starts."""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Sequence
from importlib import import_module

from rollserve.build.catalogs import NO_SANDBOX
from rollserve.config import Settings
from rollserve.errors import ConfigError

SWITCH_INTERVAL_S = 0.001
"""Threads decode payloads beside the loop; with Python's default it waits 5 ms for each of them."""

GC_THRESHOLDS = (10_000, 10, 10)
"""Thousands of sessions are many live objects: full collections are rare, young ones cheap."""


FILES_PER_SANDBOX = 5
FILES_BESIDE = 128
"""Connections, segments, libraries, logs: of a worker without attempts."""


def check_open_files(settings: Settings) -> None:
    """Raises ``ConfigError`` when a worker's slots need more open files than it may have."""
    slots = settings.workers
    attempts = slots.init_slots + slots.ready_slots + slots.run_slots + slots.grade_slots
    needed = attempts * FILES_PER_SANDBOX + FILES_BESIDE
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if slots.runtime != NO_SANDBOX and hard < needed:
        raise ConfigError(
            f"{attempts} slots need about {needed} open files in each worker, and {hard} are allowed",
            field="workers.run_slots",
            hint=f"`ulimit -n {needed}` before the start, or fewer slots",
        )


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
