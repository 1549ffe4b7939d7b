"""RUN_DIR/ranks.json: the processes of the ranks of the newest fit there, so that another process can see what they are doing.

Must not know: how stacks are read; imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from fabricate.distributed.hang_report import Listener
from fabricate.distributed.stacks import Address
from fabricate.errors import FabricateError

_NAME = "ranks.json"


def write_ranks(run_dir: Path, fit: str, addresses: Sequence[Address], listeners: Sequence[Listener]) -> None:
    """Write the file. `fit`: the unique name of this fit; listeners: the code of its hooks. One rank."""
    content = {"fit": fit, "ranks": [dataclasses.asdict(each) for each in addresses], "listeners": listeners}
    temporary = run_dir / f".{_NAME}"
    temporary.write_text(json.dumps(content))
    temporary.replace(run_dir / _NAME)


def read_ranks(run_dir: Path) -> tuple[list[Address], list[Listener]]:
    """The addresses and listeners that `write_ranks` wrote. Raises FabricateError if the file is missing or damaged."""
    file = run_dir / _NAME
    try:
        content = json.loads(file.read_text())
        return [Address(**rank) for rank in content["ranks"]], [(f, a, b, n) for f, a, b, n in content["listeners"]]
    except FileNotFoundError as exc:
        raise FabricateError(
            f"{str(run_dir)!r} holds no {_NAME}, so no fit has begun there; give the run_dir of a fit"
        ) from exc
    except (ValueError, KeyError, TypeError) as exc:
        raise FabricateError(
            f"{file} is damaged or was not written by fabricate ({type(exc).__name__}: {exc}); start the fit again, which writes it "
            "anew"
        ) from exc


def is_written_by(run_dir: Path, fit: str) -> bool:
    """Whether this process sees the file that `fit` wrote. Reads only the beginning of the file."""
    try:
        with (run_dir / _NAME).open() as file:
            return file.read(100).startswith(json.dumps({"fit": fit})[:-1])
    except OSError:
        return False
