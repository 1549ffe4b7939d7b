"""Compares the five scripts of examples/transformers with `transformers.Trainer` and with transformers' own scripts.

    python -m campaigns.transformers_scripts                       # beside transformers.Trainer, on the same model and data
    python -m campaigns.transformers_scripts --source CHECKOUT     # of the repository of transformers: its scripts too, unmodified
    python -m campaigns.transformers_scripts --source CHECKOUT --out docs/from-transformers.md

The exit code is 1 if a loss or a metric differs without a known reason.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from campaigns.transformers_scripts.cases import CASES
from campaigns.transformers_scripts.page import HEADING, Row, section, table, wrong
from campaigns.transformers_scripts.sides import by_fabricate, by_their_script, by_trainer


def observe(name: str, source: Path | None) -> Row:
    """Run a case on every side."""
    with tempfile.TemporaryDirectory() as folder:
        ours = by_fabricate(name, Path(folder))
        trainer = by_trainer(name, Path(folder))
        return Row(name, ours, trainer, None if source is None else by_their_script(name, Path(folder), source))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="a checkout of the repository of transformers")
    parser.add_argument("--out", type=Path, help="the page whose table is written")
    options = parser.parse_args()
    if options.out is not None and options.source is None:
        parser.error("--out needs --source: the page has the lines of transformers' scripts")
    rows = [observe(name, options.source) for name in CASES]
    text, faults = table(rows, options.source), [fault for row in rows for fault in wrong(row)]
    print(text, *faults, sep="\n")
    if options.out is not None:
        page = options.out.read_text(encoding="utf-8")
        before, heading, after = page.partition(HEADING)
        rest = after.partition("\n## ")
        options.out.write_text(f"{before}{heading}{section(text, options.source)}{rest[1]}{rest[2]}", encoding="utf-8")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
