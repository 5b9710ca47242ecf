"""The command line: ``rollserve serve | try | submit | status | show | cancel | run | policy | evaluate |
regrade | export | callback | drift | verify | image | bench | doctor``. ``edge`` is where commands begin and
their errors end."""


def main() -> None:
    """Entry point. Imports lazily: ``rollserve --help`` must be instant."""
    from rollserve.cli.app import run

    run()
