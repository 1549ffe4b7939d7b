"""A rank's share of the host's memory, under all limits that are in force.

Must not know: torch, strategies, the use of the memory.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path


def host_memory(ranks: int = 1, root: Path = Path("/")) -> tuple[int, str]:
    """The bytes of host memory that each of `ranks` processes on this host can use, and the limit that decides.

    The ranks share the machine's memory and the limits of control groups; `ulimit -d` and `ulimit -v` apply to each process. `root`: the
    directory with proc and sys.
    """
    share = f", shared by {ranks} ranks" if ranks > 1 else ""
    limits = [(count // ranks, what + share) for count, what in _shared(root)]
    for number, what in ((resource.RLIMIT_DATA, "ulimit -d"), (resource.RLIMIT_AS, "ulimit -v")):
        soft, _ = resource.getrlimit(number)
        if soft != resource.RLIM_INFINITY:
            limits.append((soft, what))
    return min(limits)


def _shared(root: Path) -> Iterator[tuple[int, str]]:
    yield os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "the host's memory"
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        mount, file = (
            ("sys/fs/cgroup/memory", "memory.limit_in_bytes") if controllers else ("sys/fs/cgroup", "memory.max")
        )
        if controllers and "memory" not in controllers.split(","):
            continue
        group = Path(path.lstrip("/"))
        for place in (group, *group.parents):  # limits of the parent groups apply too
            text = "".join(_lines(root / mount / place / file))
            if text.isdigit():
                yield (
                    int(text),
                    f"the limit of control group /{place}" if place.parts else "the limit of the control group",
                )


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
