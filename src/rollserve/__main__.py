"""``python -m rollserve``: the command line."""

from rollserve.cli import main

main()
