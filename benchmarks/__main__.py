"""Runs every benchmark, one after another, and writes what they found: JSON, and the tables of docs/benchmarks.md.

python -m benchmarks              # all of it, about half an hour
python -m benchmarks overhead     # one part; the tables of the others stay as they are
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.tables import machine, tables

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results.json"
PAGE = ROOT / "docs" / "benchmarks.md"
PARTS = ("overhead", "startup", "compiling", "scaling", "checkpoint", "dispatch")
FIGURES = ("overhead", "startup")
"""These write figures, for several tables; the others print their own."""


def _run(part: str) -> Any:
    """What `part` found, from a process of its own."""
    if part not in FIGURES:
        done = subprocess.run([sys.executable, "-m", f"benchmarks.{part}"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        print(done.stdout)
        if done.returncode:
            raise SystemExit(f"benchmarks.{part} failed with exit code {done.returncode}")
        return done.stdout
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "found.json")
        subprocess.run([sys.executable, "-m", f"benchmarks.{part}", "--json", str(found)], cwd=ROOT, check=True)
        return json.loads(found.read_text())


def write_page(results: dict[str, Any]) -> None:
    """Put each table between its two markers in the page; the text around them is written by hand."""
    page = PAGE.read_text(encoding="utf-8")
    for name, table in tables(results).items():
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
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for part in options.parts or PARTS:
        print(f"== {part}", file=sys.stderr, flush=True)
        results[part] = {"machine": machine(), "found": _run(part)}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        write_page(results)
    print("\n\n".join(tables(results).values()))


if __name__ == "__main__":
    main()
