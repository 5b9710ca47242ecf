"""``python -m rollserve.localserver``."""

import sys

from rollserve import installing

try:
    from rollserve.localserver.cli import main
except ModuleNotFoundError as error:
    if not error.name or error.name.startswith("rollserve"):
        raise
    sys.exit(
        f"error: the local server needs {error.name}, which is not installed\n"
        f"hint:  {installing.extra('local')}"
    )

if __name__ == "__main__":
    raise SystemExit(main())
