"""What this machine gives a rank: the memory of its device, or its share of the host's, under every limit in force.

Must not know: torch, strategies, what the memory is used for.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path


def host_memory(ranks: int = 1, root: Path = Path("/")) -> tuple[int, str]:
    """Bytes of host memory that one of `ranks` processes of this host can have, and what limits it.

    The machine's memory and the control groups' limits are shared among the ranks; `ulimit -d` and `ulimit -v` count for
    each process. `root`: where proc and sys are mounted.
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
        for place in (group, *group.parents):  # a limit of any group above counts as well
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
