"""Runs the campaigns: `python -m campaigns.checkpoints [NAME ...] [--long] [--seed N] [--json FILE] [--out PAGE]`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from campaigns.checkpoints.page import page
from fabricate.testing import close_pools


def crash(long: bool, seed: int) -> dict[str, Any]:
    """Crash after every operation, in this process."""
    from campaigns.checkpoints import crashes

    return {"system calls": crashes.system_calls(), "ends": crashes.run(40 if long else 4, seed)}


def corrupt(long: bool, seed: int) -> dict[str, Any]:
    """Load altered and forged checkpoints."""
    from campaigns.checkpoints import corruption, refusals

    return {"refusals": refusals.run(), "mutations": corruption.run(100_000 if long else 4_000, seed)}


def mutants(long: bool, seed: int) -> dict[str, Any]:
    """Run the code with one line removed at a time."""
    from campaigns.checkpoints import mutants

    by_site = mutants.run(mutants.VITAL)
    unnoticed = [str(site) for site, noticed in by_site.items() if not noticed]
    if unnoticed:
        raise AssertionError("nothing notices when this is taken out:\n" + "\n".join(unnoticed))
    return {"kinds": {str(site): site.kind for site in by_site}, "noticed by": {str(k): v for k, v in by_site.items()}}


def kill(long: bool, seed: int) -> dict[str, Any]:
    """Kill and resume real runs."""
    from campaigns.checkpoints.kills import Kind, run

    modes = ("sync", "async")
    single = {Kind("single", 1, mode): 240 if long else 10 for mode in modes}
    several = {Kind(name, 2, mode): 30 if long else 2 for name in ("ddp", "fsdp") for mode in modes}
    if long:
        several |= {Kind("single", 1, "async", workers=2): 150}
        several |= {Kind(f"zero{stage}", 2, mode): 4 for stage in (1, 2, 3) for mode in modes}
    counts = run(single, seed, every=2 if long else 16) | run(several, seed)
    return {"kills": counts, "in all": sum(counts.values())}


def pairs(long: bool, seed: int) -> dict[str, Any]:
    """Load every checkpoint under every strategy."""
    from campaigns.checkpoints import pairs

    return pairs.run(long)


def memory(long: bool, seed: int) -> dict[str, Any]:
    """Measure the memory of a save and a resume."""
    from campaigns.checkpoints import memory

    return memory.run(("sync", "async") if long else ("sync",))


CAMPAIGNS: dict[str, Callable[[bool, int], dict[str, Any]]] = {
    "crash": crash, "corrupt": corrupt, "mutants": mutants, "kill": kill, "pairs": pairs, "memory": memory,
}  # fmt: skip


def main() -> None:
    """Run the named campaigns, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("campaigns", nargs="*", metavar="campaign", help=f"{', '.join(CAMPAIGNS)}; default: all")
    parser.add_argument("--long", action="store_true", help="the full number: an hour on two cores")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="put what was found there, beside what other campaigns have found")
    parser.add_argument("--out", type=Path, help="write the page of what was found, and of what --json holds")
    options = parser.parse_args()
    unknown = set(options.campaigns) - CAMPAIGNS.keys()
    if unknown:
        parser.error(f"there is no campaign {', '.join(sorted(unknown))}; there are {', '.join(CAMPAIGNS)}")
    results: dict[str, Any] = {}
    if options.json and options.json.exists():
        results = json.loads(options.json.read_text())
    results["seed"] = options.seed
    try:
        for name in options.campaigns or CAMPAIGNS:
            try:
                results[name] = CAMPAIGNS[name](options.long, options.seed)
            except AssertionError as exc:
                sys.exit(f"{name}: {exc}")
            print(json.dumps({name: results[name]}, indent=1), flush=True)
            if options.json:
                options.json.write_text(json.dumps(results, indent=1) + "\n")
    finally:
        close_pools()
    if options.out:
        options.out.write_text(page(results))


if __name__ == "__main__":
    main()
