"""An agent's process that outlives its attempt: it asks on until it is refused, and says how."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from openai import APIStatusError, OpenAI


def main(folder: Path) -> None:
    while not (folder / "session").exists():
        time.sleep(0.05)
    with OpenAI(**json.loads((folder / "session").read_text())) as client:
        try:
            while True:
                client.models.list()
                (folder / "used").touch()
                time.sleep(0.05)
        except APIStatusError as error:
            refused = [(error.status_code, error.code)]
        try:
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        except APIStatusError as error:
            refused.append((error.status_code, error.code))
            sys.stdout.write(json.dumps({"refused": refused, "message": error.message}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
