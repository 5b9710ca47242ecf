"""What is left of a demo: a picture, one readable trajectory, and ``demo-report.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rollserve.demo.record import Record


def report(
    record: Record, *, seed: int, backend: str, stuck: int, dynamic_sampling: bool, mix: bool
) -> dict[str, Any]:
    """The figures of ``demo-report.json``. ``milestone``: what it took to reach a success rate, where
    that was asked for; without figures where it was not reached. Raises ``ValueError`` when the demo did
    not end."""
    if record.trained is None or record.done is None:
        raise ValueError("the trainer did not finish")
    trained, done = record.trained, record.done
    staleness = [step["stats"]["staleness_mean"] for step in record.steps if step["stats"]]
    return {
        "success_rate_start": done["success_rate_start"],
        "success_rate_end": done["success_rate_end"],
        "train_seconds": round(trained["train_seconds"], 2),
        "trainer_idle_share": round(record.idle_share(), 4),
        "trainer_busy_seconds": round(trained["busy_s"], 2),
        "trainer_cpu_seconds": round(trained["cpu_s"], 2),
        "rollouts_delivered": trained["rollouts"],
        "stuck": stuck,
        "tokens_sampled": trained["tokens"],
        "policy_versions": trained["version"],
        "steps": len(record.steps),
        "staleness_mean": round(sum(staleness) / max(1, len(staleness)), 3),
        "staleness_max": max(
            (step["stats"]["staleness_max"] for step in record.steps if step["stats"]), default=0
        ),
        "weight_push_seconds_median": _median([step["pushed_s"] for step in record.steps if step["stats"]]),
        "max_log_ratio": max(
            (step["stats"]["ratio_error"] for step in record.steps if step["stats"]), default=0.0
        ),
        "evaluation_rollouts": [event["rollouts"] for event in record.evaluations],
        "milestone": record.milestone,
        "dynamic_sampling": dynamic_sampling,
        "mix": mix,
        "seed": seed,
        "backend": backend,
    }


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    return round(ordered[len(ordered) // 2], 4) if ordered else 0.0


def picture(record: Record, path: Path) -> None:
    """Above: reward by step. Below: trainer and rollouts over the same time."""
    figure = Figure(figsize=(10, 7), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, height_ratios=[3, 2], sharex=True)
    origin = float(record.steps[0]["began"]) if record.steps else record.started
    _learning_curve(above, record, origin)
    _overlap(below, record, origin)
    figure.savefig(path, dpi=110)


def _learning_curve(axes: Axes, record: Record, origin: float) -> None:
    at = [float(step["stepped"]) - origin for step in record.steps]
    axes.plot(at, [step["reward"] for step in record.steps], marker=".", label="reward of the step's groups")
    for event in record.evaluations:
        axes.axhline(event["success_rate"], linestyle=":", color="gray")
        text = f"fresh tasks, {event['when']}: {event['success_rate']:.3f}"
        axes.annotate(text, (at[-1] if at else 0, event["success_rate"]), ha="right", va="bottom", fontsize=8)
    axes.set(ylim=(0, 1.05), ylabel="success rate", title="A policy learns through the service")
    axes.legend(loc="lower right")


def _overlap(axes: Axes, record: Record, origin: float) -> None:
    moments = [moment for moment in record.moments if moment.at >= origin - 2]
    at = [moment.at - origin for moment in moments]
    for stage in ("run", "grade"):
        axes.plot(at, [moment.stages.get(stage, 0) for moment in moments], label=f"rollouts in {stage}")
    top = max([max(moment.stages.values(), default=0) for moment in moments] or [1])
    busy = [(float(s["began"]) - origin, float(s["stepped"]) - float(s["began"])) for s in record.steps]
    pushes = [(float(s["stepped"]) - origin, float(s["pushed_s"])) for s in record.steps]
    axes.broken_barh(busy, (-0.16 * top, 0.12 * top), color="tab:green", label="trainer: gradient step")
    axes.broken_barh(pushes, (-0.16 * top, 0.12 * top), color="tab:red", label="trainer: pushing weights")
    axes.set(xlabel="seconds since the first step", ylabel="rollouts in flight")
    axes.legend(loc="upper right", fontsize=8)


def write(data: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n")


def readable(trajectory: dict[str, Any]) -> str:
    """One trajectory for people: who said what, how many tokens, under which version."""
    lines = []
    for message in trajectory.get("conversation", []):
        text = message.get("content") or ""
        for call in message.get("tool_calls", []):
            text += f"\n  → {call['name']}({call['arguments']})"
        lines.append(f"[{message['role']}] {text}".rstrip())
    return "\n".join(lines) + "\n"
