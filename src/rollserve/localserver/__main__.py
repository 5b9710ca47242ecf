"""``python -m rollserve.localserver``."""

from rollserve.localserver.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
