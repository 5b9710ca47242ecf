"""``python3 -m tally < sheet``: the hours of each project, and of all."""

import sys

from tally.report import BadLine, report


def main() -> int:
    try:
        sys.stdout.write(report(sys.stdin))
    except BadLine as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
