"""The command line: ``rollserve serve | try | submit | status | show | cancel | drift | verify | image |
bench | doctor``."""


def main() -> None:
    """Entry point. Imports lazily: ``rollserve --help`` must be instant."""
    from rollserve.cli.app import run

    run()
