"""Random agent sessions against an independent reference of the trajectory tree:
``python bench/tree_abuse.py --sessions 10000``.

Each request of each session must find the same place in both, and each sampled token must be trained once or
be left out for a reason. Stops at the first session that differs and names its seed; prints what the agents
did, what the calls were taken for, and what became of the tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter

from rollserve.testing.agent_behaviours import Session


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--calls", type=int, default=30, help="of a session, at most")
    parser.add_argument("--seed", type=int, default=0, help="of the first session")
    parser.add_argument("--cpu-s", type=float, default=600.0, help="stop after so much CPU time")
    arguments = parser.parse_args()
    happened: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    done = 0
    for seed in range(arguments.seed, arguments.seed + arguments.sessions):
        if time.process_time() > arguments.cpu_s:
            break
        rng = random.Random(seed)
        session = Session(rng)
        try:
            session.run(rng.randrange(1, arguments.calls + 1))
        except BaseException:
            print(f"session {seed} differs")
            raise
        happened += session.happened
        tokens += session.tokens
        done += 1
    report = {
        "sessions": done,
        "cpu_s": round(time.process_time(), 1),
        "happened": dict(sorted(happened.items())),
        "tokens": dict(tokens),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
