"""`python -m trust [PART ...]`: run the parts, keep what came of each, write the table; exit code 1 where something did not hold."""

from __future__ import annotations

import argparse
import sys

from trust import coverage, disk, kills, mutants, table, tests, together, versions
from trust.outcome import keep

PARTS = {
    "catalogue": tests.catalogue,
    "fuzz": tests.fuzz,
    "kills": kills.run,
    "processes": together.run,
    "disk": disk.run,
    "mutants": mutants.run,
    "coverage": coverage.run,
    "versions": versions.run,
}


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m trust", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all); table writes the table alone"
    )
    parser.add_argument("--kills", type=int, default=20, help="moments per command")
    parser.add_argument("--examples", type=int, default=5000, help="of each fuzzed property")
    parser.add_argument("--share", type=float, default=1.0, help="of the mutants")
    parser.add_argument("--minutes", type=float, default=600.0, help="for the mutants; the next time goes on")
    parser.add_argument("--only", nargs="*", default=[], help="some of the commands, or sessions, of a part")
    given = parser.parse_args()
    unknown = set(given.parts) - {*PARTS, "table"}
    if unknown:
        parser.error(f"there is no part {sorted(unknown)[0]}; there are {', '.join(PARTS)}")
    broken = 0
    for part in given.parts or PARTS:
        if part == "table":
            continue
        outcome = PARTS[part](given)
        keep(part, outcome, given.only)
        broken += not outcome.holds
        for line in (*(f"{row.what}: {row.held} of {row.tried} ({row.note})" for row in outcome.rows), *outcome.details):
            sys.stdout.write(f"{part}: {line}\n")
    table.write(tuple(PARTS))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
