"""``rollserve serve``: the server in the foreground, until SIGINT, SIGTERM or SIGHUP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import uvloop

from rollserve import config
from rollserve.api.serve import Ready, run_server
from rollserve.build.logs import configure_logs
from rollserve.build.process import tune_process
from rollserve.cli.output import counted, err


def announce(ready: Ready) -> None:
    """What a person needs to know at the start; the admin key is shown this once."""
    workers = counted(ready.workers, "worker")
    err.print(f"rollserve is ready at {ready.url} ({workers}, data in {ready.data_dir})", soft_wrap=True)
    if ready.new_admin_key:
        err.print(f"admin key, shown this once: {ready.new_admin_key}", markup=False)
    if not ready.key_required:
        err.print("requests from this machine need no key (bound to loopback only)")
    if ready.unsafe_runtime:
        err.print(
            f"UNSAFE: the runtime {ready.unsafe_runtime!r} isolates nothing; what a model writes runs as you",
            style="bold red",
        )


def serve(config_path: Path | None, overrides: dict[str, Any]) -> None:
    """Raises ``ConfigError`` before anything is started."""
    settings = config.load(config=config_path, overrides=overrides)
    configure_logs(settings.log_level)
    tune_process()
    uvloop.run(run_server(settings, announce))
