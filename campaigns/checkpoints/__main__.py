"""Runs the campaigns: `python -m campaigns.checkpoints [crash] [corrupt] [mutants] [kill] [--long] [--seed N] [--json FILE]`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAMES = ("crash", "corrupt", "mutants", "kill")


def crash(long: bool, seed: int) -> dict[str, Any]:
    """Every operation as the last one, in process."""
    from campaigns.checkpoints import crashes

    return {"system calls": crashes.system_calls(), "ends": crashes.run(150 if long else 4, seed)}


def corrupt(long: bool, seed: int) -> dict[str, Any]:
    """Altered and forged checkpoints."""
    from campaigns.checkpoints import corruption, refusals

    return {"refusals": refusals.run(), "mutations": corruption.run(100_000 if long else 4_000, seed)}


def mutants(long: bool, seed: int) -> dict[str, Any]:
    """One line taken out at a time."""
    from campaigns.checkpoints import mutants

    found = mutants.run(mutants.KINDS if long else mutants.VITAL)
    unnoticed = [site for site, noticed in found.items() if not noticed]
    if unnoticed:
        raise AssertionError("nothing notices when this is taken out:\n" + "\n".join(unnoticed))
    return found


def kill(long: bool, seed: int) -> dict[str, Any]:
    """Real kills."""
    from campaigns.checkpoints.kills import Kind, run

    modes = ("sync", "async")
    single = {Kind("single", 1, mode): 180 if long else 20 for mode in modes}
    several = {Kind(name, 2, mode): 80 if long else 3 for name in ("ddp", "fsdp") for mode in modes}
    if long:
        several |= {Kind("single", 1, "async", workers=2): 30}
        several |= {Kind(f"zero{stage}", 2, mode): 15 for stage in (1, 2, 3) for mode in modes}
    counts = run(single, seed, every=2 if long else 8) | run(several, seed)
    return {"kills": counts, "in all": sum(counts.values())}


def main() -> None:
    """Run those that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("campaigns", nargs="*", metavar="campaign", help=f"{', '.join(NAMES)}; default: all")
    parser.add_argument("--long", action="store_true", help="the full number; hours, not minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write what was found there")
    options = parser.parse_args()
    unknown = set(options.campaigns) - set(NAMES)
    if unknown:
        parser.error(f"there is no campaign {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    functions: dict[str, Callable[[bool, int], dict[str, Any]]] = {
        "crash": crash, "corrupt": corrupt, "mutants": mutants, "kill": kill,
    }  # fmt: skip
    found: dict[str, Any] = {"seed": options.seed, "long": options.long}
    for name in options.campaigns or NAMES:
        began = time.monotonic()
        try:
            found[name] = functions[name](options.long, options.seed)
        except AssertionError as exc:
            sys.exit(f"{name}: {exc}")
        found[name] |= {"seconds": round(time.monotonic() - began, 1)}
        print(json.dumps({name: found[name]}, indent=1), flush=True)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
