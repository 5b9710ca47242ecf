"""Can a tokenizer be loaded here? ``python -m rollserve.gateway.tokenizer_check`` reads its name on standard
input, and writes what is wrong (``message``, ``hint``) on standard output, with exit code 1.

A process of its own, as for the template's probe: a large vocabulary holds the interpreter for a second and
hundreds of megabytes for good, and a download that does not end can be killed.
"""

from __future__ import annotations

import json
import sys

from rollserve.errors import InvalidInput
from rollserve.gateway.tokens import load_tokenizer


def main() -> int:
    try:
        load_tokenizer(sys.stdin.read())
    except InvalidInput as error:
        sys.stdout.write(json.dumps({"message": error.message, "hint": error.hint}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
