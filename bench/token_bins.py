"""No cost, a count: tokens sampled = tokens delivered + tokens in named bins, exactly.

A server with two workers and three scripted backends, six runs with a rule each (filters, deadlines,
stragglers, staleness), under weight updates in all modes, cancels, nacks, killed workers and failing
backends. Ends with 1 when a token is missing or there twice.

    .venv/bin/python bench/token_bins.py [--rollouts 10000] [--kills 8] [--seed 1] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from rollserve.testing.token_trial import Found, Trial


def shown(found: Found) -> str:
    did = ", ".join(f"{count} {what}" for what, count in found.did.items())
    bins = ", ".join(f"{name} {count}" for name, count in sorted(found.bins.items()) if count)
    lost = found.sampled - found.recorded
    lines = [
        f"rollouts   {found.rollouts} in {found.seconds} s; {did}",
        f"recorded   {found.recorded}",
        f"in bins    {sum(found.bins.values())}: {bins}",
        f"trained    {found.trained} in acked samples",
        f"lost       {lost} sampled by backends in answers that broke: in no record",
        f"equal      {'yes' if found.equal else 'NO'}",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rst") as folder:
        trial = Trial(folder=Path(folder), rollouts=options.rollouts, kills=options.kills, seed=options.seed)
        found = asyncio.run(trial.run())
    print(json.dumps(asdict(found) | {"equal": found.equal}) if options.json else shown(found))
    return 0 if found.equal else 1


if __name__ == "__main__":
    sys.exit(main())
