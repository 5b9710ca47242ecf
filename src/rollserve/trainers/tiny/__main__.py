"""``python -m rollserve.trainers.tiny --out DIR [--seed N] [--check]``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from transformers import Qwen3ForCausalLM

from rollserve.trainers.tiny.demonstrations import Mixture
from rollserve.trainers.tiny.model import save_model
from rollserve.trainers.tiny.warmstart import WarmStart, warm_start

EASY = 0.25
"""Share of easy tasks among those that are shown to a policy for a mix."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="rollserve.trainers.tiny", description="Make the demo's policy.")
    made.add_argument("--out", type=Path, help="directory for the warm-started model")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--threads", type=int, default=1, help="torch threads")
    made.add_argument("--mix", action="store_true", help="show easy tasks too, which it then always solves")
    made.add_argument(
        "--check", action="store_true", help="train it on with GRPO against a simulated sandbox"
    )
    made.add_argument("--check-steps", type=int, default=80)
    return made


def main() -> int:
    args = parser().parse_args()
    torch.set_num_threads(args.threads)
    settings = WarmStart(mixture=Mixture(easy=EASY)) if args.mix else WarmStart()

    def progress(step: int, loss: float, seconds: float) -> None:
        if step % 5 == 0:
            sys.stderr.write(f"warm start: step {step}/{settings.steps} loss {loss:.3f} {seconds:.1f} s\n")

    model = warm_start(settings, seed=args.seed, report=progress)
    if args.out is not None:
        save_model(model, args.out)
    if args.check:
        _check(model, args.seed, args.check_steps)
    return 0


def _check(model: Qwen3ForCausalLM, seed: int, steps: int) -> None:
    from rollserve.trainers.tiny.selfcheck import Check, learn  # needs the extra "local" as well

    def progress(step: int, rate: float) -> None:
        if step % 5 == 0:
            sys.stderr.write(f"grpo: step {step}/{steps} success {rate:.2f}\n")

    curve = learn(model, Check(steps=steps), seed=seed, report=progress)
    summary = {
        "seed": seed,
        "steps": steps,
        "success_rate_start": curve.start,
        "success_rate_end": curve.end,
        "seconds": round(curve.seconds, 1),
        "largest_log_ratio": curve.largest_log_ratio,
    }
    sys.stdout.write(json.dumps(summary) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
