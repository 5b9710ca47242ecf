"""Does the demo's policy get as good in fewer trainer seconds with dynamic sampling and early stop?

``python bench/demo_dynamic_sampling.py --seeds 0,1,2 [--rate 0.85] [--no-mix] [--json]``: nine demos, a
quarter of an hour or more on two idle cores.

The whole demo, three times a seed, each from the same warm start, with the same optimizer, learning rate, and
groups and rollouts a step. Trained on is a mix: 3/8 of the tasks are solved nearly always from the start, 3/8
never, 1/4 can be learnt (``rollserve.trainers.tiny.task.Mix``). Success is the rate on 200 fresh tasks of the
kind that can be learnt. With ``--no-mix`` all tasks are of that kind, as in the demo itself.

- *all*: the trainer submits the tasks, takes every group, computes gradients of all of them.
- *skip*: the same, but it looks first and leaves out groups whose rewards are all alike.
- *dynamic*: the server draws the tasks, leaves such groups out, replaces them at once, and stops what is not
  needed when a version has its groups.

The first version that reaches ``--rate`` is found afterwards, by bisection, on fresh tasks that are the same
for all. Until it: steps, groups that had a gradient, seconds, seconds the trainer was busy (gradient steps,
weight pushes), CPU seconds of the gradient steps and of its process, which other work on the machine does not
lengthen, and what the run's rollouts sampled, those that were left out or stopped too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from rollserve import stopping

WAYS = {"all": ("--train-all",), "skip": (), "dynamic": ("--dynamic-sampling",)}
STEPS = {"all": 24, "skip": 24, "dynamic": 8}
"""At most; without the mix the demo ends by itself."""

GRACE_S = 30.0
FIGURES = ("step", "trained", "seconds", "busy_s", "gradient_cpu_s", "cpu_s", "rollouts", "tokens")


def make_model(seed: int, mix: bool, folder: Path) -> None:
    """Raises ``CalledProcessError``."""
    command = [sys.executable, "-m", "rollserve.trainers.tiny", "--out", str(folder), "--seed", str(seed)]
    _output([*command, "--mix"] if mix else command, folder.parent)


def run(seed: int, way: str, options: argparse.Namespace, model: Path) -> dict[str, Any]:
    """One demo. Raises ``CalledProcessError``."""
    command = [sys.executable, "-m", "rollserve.demo", "--json", "--seed", str(seed), "--model", str(model)]
    command += [*WAYS[way], "--milestone", str(options.rate), *options.extra]
    if options.mix:
        command += ["--mix", "--steps", str(STEPS[way])]
    with tempfile.TemporaryDirectory(prefix="rollserve-demo-") as folder:
        report = json.loads(_output(command, Path(folder)))
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


def _output(command: list[str], folder: Path) -> bytes:
    """Of a process; told to end in time to stop its own processes when we are."""
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE) as process:
        try:
            printed, _ = process.communicate()
        except BaseException:
            process.terminate()
            process.wait(GRACE_S)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return printed


def show(row: dict[str, Any]) -> None:
    print(
        f"seed {row['seed']} {row['way']:8} reached after {row['step']} steps ({row['trained']} groups with a"
        f" gradient), {row['seconds']} s: trainer busy {row['busy_s']} s, CPU {row['gradient_cpu_s']} s of"
        f" gradient steps, {row['cpu_s']} s in all;"
        f" {row['rollouts']} rollouts, {row['tokens']} tokens sampled; in all {row['steps_in_all']} steps,"
        f" {row['success_rate_start']:.2f} → {row['success_rate_end']:.2f}, idle {row['idle_share']:.2f}",
        flush=True,
    )


def medians(rows: list[dict[str, Any]], way: str) -> dict[str, float | None]:
    """Over the seeds; None where one has not got there."""
    mine = [row for row in rows if row["way"] == way]
    reached = all(row["step"] is not None for row in mine)
    return {name: median(row[name] for row in mine) if reached else None for name in FIGURES}


def ratios(rows: list[dict[str, Any]], other: str) -> dict[str, float | None]:
    """Dynamic to another way of the same seed, the median; None where one has not got there."""
    by = {(row["seed"], row["way"]): row for row in rows}
    pairs = [(by[seed, "dynamic"], by[seed, other]) for seed in sorted({row["seed"] for row in rows})]
    found: dict[str, float | None] = {}
    for name in FIGURES:
        whole = all(mine[name] is not None and its[name] for mine, its in pairs)
        found[name] = round(median(mine[name] / its[name] for mine, its in pairs), 2) if whole else None
    return found


def seeds(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--seeds", type=lambda text: [int(each) for each in text.split(",")], default=[0, 1, 2]
    )
    parser.add_argument("--rate", type=float, default=0.85)
    parser.add_argument("--mix", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", action="store_true")
    options, extra = parser.parse_known_args()
    options.extra = extra
    return options


def main() -> None:
    options = parse()
    stopping.end_as_interrupted()
    rows: list[dict[str, Any]] = []
    for seed in options.seeds:
        with tempfile.TemporaryDirectory(prefix="rollserve-model-") as folder:
            model = Path(folder) / "model"
            make_model(seed, options.mix, model)
            for way in WAYS:
                rows.append(run(seed, way, options, model))
                if not options.json:
                    show(rows[-1])
    result = {
        "rows": rows,
        "medians": {way: medians(rows, way) for way in WAYS},
        "dynamic_to_all": ratios(rows, "all"),
        "dynamic_to_skip": ratios(rows, "skip"),
    }
    if options.json:
        print(json.dumps(result))
        return
    for name in ("medians", "dynamic_to_all", "dynamic_to_skip"):
        print(f"{name}: {json.dumps(result[name])}")


if __name__ == "__main__":
    main()
