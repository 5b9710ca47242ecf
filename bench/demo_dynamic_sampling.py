"""Does the demo's policy get as good in fewer trainer seconds with dynamic sampling and early stop?

``python bench/demo_dynamic_sampling.py --seeds 0 1 2 [--rate 0.85] [--json]``, about five minutes a seed.

The whole demo, twice a seed: the trainer submits fresh tasks and takes every group (*plain*), or the server
draws the tasks, leaves out groups of which all rollouts succeeded or all failed, and stops what is not needed
when a version has its groups (*dynamic*). The first version that reaches ``--rate`` is found afterwards, by
bisection, on 200 fresh tasks that are the same for all; then: steps until it, seconds until it, seconds the
trainer was busy (gradient steps and weight pushes), and CPU seconds of its process, which other work on the
machine does not lengthen.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from statistics import median
from typing import Any

WAYS = {"plain": (), "dynamic": ("--dynamic-sampling",)}
GRACE_S = 30.0
FIGURES = ("step", "seconds", "busy_s", "cpu_s")


def run(seed: int, way: str, rate: float, extra: list[str]) -> dict[str, Any]:
    """One demo. Raises ``CalledProcessError``."""
    command = [sys.executable, "-m", "rollserve.demo", "--json", "--seed", str(seed)]
    command += [*WAYS[way], "--milestone", str(rate), *extra]
    with tempfile.TemporaryDirectory(prefix="rollserve-demo-") as folder:
        report = json.loads(_output(command, folder))
    found = report["milestone"]
    return {
        "seed": seed,
        "way": way,
        **{name: found.get(name) for name in FIGURES},
        "success_rate_start": report["success_rate_start"],
        "success_rate_end": report["success_rate_end"],
        "steps_in_all": report["steps"],
        "seconds_in_all": report["train_seconds"],
        "busy_s_in_all": report["trainer_busy_seconds"],
        "cpu_s_in_all": report["trainer_cpu_seconds"],
        "idle_share": report["trainer_idle_share"],
    }


def _output(command: list[str], folder: str) -> bytes:
    """Of the demo; told to end in time to stop its own processes when we are."""
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE) as demo:
        try:
            printed, _ = demo.communicate()
        except BaseException:
            demo.terminate()
            demo.wait(GRACE_S)
            raise
    if demo.returncode:
        raise subprocess.CalledProcessError(demo.returncode, command)
    return printed


def show(row: dict[str, Any]) -> None:
    print(
        f"seed {row['seed']} {row['way']:8} reached after {row['step']} steps, {row['seconds']} s: trainer"
        f" busy {row['busy_s']} s, {row['cpu_s']} s of CPU; in all {row['steps_in_all']} steps,"
        f" {row['success_rate_start']:.2f} → {row['success_rate_end']:.2f}, idle {row['idle_share']:.2f}",
        flush=True,
    )


def ratios(rows: list[dict[str, Any]]) -> dict[str, float | None]:
    """Dynamic to plain of the same seed, the median; None where one has not got there."""
    by = {(row["seed"], row["way"]): row for row in rows}
    pairs = [(by[seed, "dynamic"], by[seed, "plain"]) for seed in sorted({row["seed"] for row in rows})]
    found: dict[str, float | None] = {}
    for name in FIGURES:
        whole = all(one[name] is not None and other[name] for one, other in pairs)
        found[name] = round(median(one[name] / other[name] for one, other in pairs), 2) if whole else None
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rate", type=float, default=0.85)
    parser.add_argument("--json", action="store_true")
    options, extra = parser.parse_known_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rows: list[dict[str, Any]] = []
    for seed in options.seeds:
        for way in WAYS:
            rows.append(run(seed, way, options.rate, extra))
            if not options.json:
                show(rows[-1])
    result = {"rows": rows, "dynamic_to_plain": ratios(rows)}
    print(json.dumps(result) if options.json else f"dynamic to plain, median: {result['dynamic_to_plain']}")


if __name__ == "__main__":
    main()
