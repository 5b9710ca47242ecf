"""The program as its users see it: what it prints, and how it ends. Nothing of it is imported here."""

import subprocess
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).parents[1]


def tally(*lines: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "tally"],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )


class TestTally(unittest.TestCase):
    def test_sums_by_project(self) -> None:
        done = tally("house 1h30", "garden 45m", "house 2h")
        self.assertEqual(done.stdout, "garden   0h45\nhouse    3h30\ntotal    4h15\n")
        self.assertEqual(done.returncode, 0)

    def test_minutes_have_two_digits(self) -> None:
        self.assertEqual(tally("a 1h05", "b 2h").stdout, "a       1h05\nb       2h00\ntotal   3h05\n")

    def test_an_empty_sheet(self) -> None:
        self.assertEqual(tally().stdout, "total   0h00\n")

    def test_comments_and_blank_lines(self) -> None:
        self.assertEqual(tally("# may", "", "a 10m").stdout, "a       0h10\ntotal   0h10\n")

    def test_a_bad_line_is_named(self) -> None:
        done = tally("# may", "", "a 10m", "b ten")
        self.assertEqual(done.stderr, "line 4: not PROJECT DURATION: b ten\n")
        self.assertEqual((done.returncode, done.stdout), (2, ""))


if __name__ == "__main__":
    unittest.main()
