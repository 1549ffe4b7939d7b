"""Runs every benchmark, one after another, and writes the results: JSON, and the tables of docs/benchmarks.md.

    python -m benchmarks              # all of it, about twenty minutes on an idle machine
    python -m benchmarks overhead     # one part; the tables of the others stay as they are
    python -m benchmarks --tables     # measures nothing: the page again from benchmarks/results.json

If a part fails, its earlier figures are kept, the other parts run, and the exit code is not 0.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.tables import machine, tables
from benchmarks.targets import targets_table

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results.json"
PAGE = ROOT / "docs" / "benchmarks.md"
PARTS = ("overhead", "sections", "startup", "compiling", "scaling", "ranks", "checkpoint", "dispatch")


def measured(part: str) -> dict[str, Any] | None:
    """The figures of `part`, run in a separate process, and the tables that it printed; None if it wrote no figures."""
    before, began = machine(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found.json")
        command = [sys.executable, "-m", f"benchmarks.{part}", "--json", str(path)]
        process = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
        print(process.stdout, flush=True)
        if not path.exists():
            return None
        figures = json.loads(path.read_text())
    return {"machine": before, "seconds": round(time.monotonic() - began), "found": figures, "text": process.stdout}


def write_page(results: dict[str, Any]) -> None:
    """Put each table between its two markers in the page; the text around them is written by hand."""
    page = PAGE.read_text(encoding="utf-8")
    for name, table in {**tables(results), "targets": targets_table(results)}.items():
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
        before, _, rest = page.partition(begin)
        if not rest:
            raise SystemExit(f"docs/benchmarks.md has no marker {begin.strip()}")
        page = before + begin + table.rstrip() + "\n" + end + rest.partition(end)[2]
    PAGE.write_text(page, encoding="utf-8")


def main() -> None:
    """Run the parts that were named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--tables", action="store_true", help="write the page from the figures there are")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    failed = []
    for part in () if options.tables else options.parts or PARTS:
        print(f"== {part}", file=sys.stderr, flush=True)
        result = measured(part)
        if result is None:
            failed.append(part)
            continue
        print(f"== {part}: {result['seconds']} s", file=sys.stderr, flush=True)
        results[part] = result
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    write_page(results)
    print("\n\n".join([*tables(results).values(), targets_table(results)]))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
