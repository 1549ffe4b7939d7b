"""The output of `fabricate doctor --run`: what the ranks of a live run are doing. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path

from fabricate.distributed.hang_report import report
from fabricate.distributed.ranks_file import read_ranks
from fabricate.distributed.stacks import ask

_LEFT_OUT = "elsewhere"
_GOOD = ("runs", "waits", _LEFT_OUT)


def ask_run(run_dir: Path, *, as_json: bool) -> tuple[str, bool]:
    """The text, and whether every rank of this host could be queried. Raises FabricateError if no fit has begun in `run_dir`."""
    addresses, listeners = read_ranks(run_dir)
    seen = dict(enumerate(ask(addresses)))
    good = all(each.state in _GOOD for each in seen.values())
    if as_json:
        return json.dumps([{"rank": rank, **each.to_json()} for rank, each in seen.items()], indent=2), good
    if all(each.state == "gone" for each in seen.values()):
        return f"no fit is running in {run_dir}: the processes of its last one are gone", good
    return report(seen, listeners), good
