"""``python -m conformance``: tries a framework package against the specification."""

from __future__ import annotations

import argparse
import functools
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from conformance import registry, report, rows, runner
from conformance.outcome import Status
from conformance.worlds import FRAMEWORKS


def main() -> int:
    """Runs cases; returns the exit code: 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m conformance", description=__doc__)
    parser.add_argument("--framework", choices=FRAMEWORKS, required=True)
    parser.add_argument("--report", type=Path, help="folder for report.{txt,json,html}")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="rows or cases")
    parser.add_argument("--quick", action="store_true", help="each case in one kind of job")
    parser.add_argument("--list", action="store_true", help="show rows and their cases")
    options = parser.parse_args()
    if find_spec("pytest") is None:
        parser.error("cases say with pytest what must be raised: pip install pytest.")
    specified = rows.load(options.framework)
    cases = registry.load(options.framework)
    unknown = sorted({row for each in cases.values() for row in each.rows} - set(rows.everything()))
    if unknown:
        parser.error(f"cases name rows that rows.yaml does not have: {', '.join(unknown)}")
    if options.only:
        wanted = set(options.only)
        if lost := wanted - set(cases) - set(specified):
            parser.error(f"neither a row nor a case: {', '.join(sorted(lost))}; see --list")
        cases = {
            name: each for name, each in cases.items() if name in wanted or wanted & set(each.rows)
        }
    if options.list:
        for row in specified:
            print(
                row, *(f"\n    {name}" for name, each in cases.items() if row in each.rows), sep=""
            )
        return 0
    if options.quick:
        left_out = [
            name for name, each in cases.items() if options.framework not in each.quick_with
        ]
        cases = {name: each for name, each in cases.items() if name not in left_out}
        print(f"left to another framework's quick run, or to other tests: {len(left_out)} cases")
    started = time.monotonic()
    note = functools.partial(print, flush=True)
    outcomes = runner.run(options.framework, cases, note, is_quick=options.quick)
    result = report.Report(options.framework, specified, cases, outcomes)
    print(result.text(is_whole=not options.only))
    print(f"{time.monotonic() - started:.0f} s")
    if options.report:
        result.write(options.report)
    return int(any(each.status is Status.FAILED for each in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
