"""What the campaigns found, as a page of the documentation."""

from __future__ import annotations

from collections import Counter
from typing import Any

from campaigns.checkpoints import memory, mutants, pairs, runs

HEAD = """# Reliability: what was done to checkpoints, and what came of it

`python -m campaigns.checkpoints --long --out docs/reliability.md` wrote this page, seed {seed}, on a CPU; `make campaign` does it again and
`make test` runs a sample of each part. Any loss, any difference, anything that goes unnoticed ends a campaign with an error, so
the numbers say how much was tried; what is promised is in [checkpoints](checkpoints.md), the format in
[checkpoint-format](checkpoint-format.md).
"""

KILL = """## Real kills

SIGKILL of a whole run, at a random moment from its first instruction to beyond its end, or before (of a write: in the middle of) a chosen
call of the file system by a save, a deletion or a resume; of one rank or of all; up to five times in one run, so that resumes are hit
too. The run is {steps} updates with dropout, running statistics, augmentation from every generator, accumulation, a schedule,
validation and a plugin with state; it saves every second update and keeps two checkpoints. Started again until it is done,
every run ended with the same bits as one that nothing disturbed: weights, optimizer, generators, metrics, exported model,
plugin, and the same checkpoints on disk. No kill cost a checkpoint, and nothing was left behind.
"""

CRASH = """## Every operation as the last one

The operations of a save, a deletion, a start after a kill and a start after damage are recorded, and ended after each of them: as a kill
does (what was done is there, a write perhaps in part), and as a power cut does (of what was not synced any part is there: some
bytes of a file, the changes of a directory up to some point). Whatever is found: every checkpoint that is listed is
whole, one of before or of after is there, a save that had returned is there, and the next start cleans up and saves.
"""

CORRUPT = """## Altered and forged checkpoints

Bytes are altered as disks do it (in any file, the manifest too); manifests are forged with the right digest, as only somebody who means it
does. All of them were refused with a `CheckpointError`, or read as the very same values where the change changed nothing
("unchanged": zeros over zeros, say). Another {refusals} hand-made cases were refused: links, pipes, names that lead elsewhere, ranks
that disagree.
"""

MUTANTS = """## The code without one of its precautions

Each `fsync`, each `rename`, each digest and each proof of coverage of `fabricate.checkpoint` is taken out, one at a time: in all
{number} variants the campaigns above or the tests of the format failed.
"""

PAIRS = """## Every checkpoint under every strategy

Written in the middle of an epoch by the topology on the left, read by the one at the top. What was read and saved again
was the same to the last bit (weights, optimizer state, schedule, progress), the samples went on in the same order, and the losses
of the updates that followed lay this far, at most and relatively, from those of one process that never stopped (AdamW, float32;
at most {tolerance:.0e} is allowed; tied weights, a frozen layer, two parameter groups, sizes that no number of ranks divides):
"""

MORE_PAIRS = """A ring of pairs each (every topology writes once and reads once) with other optimizers and dtypes. ZeRO refuses Lion and
Adafactor, which it does not know to treat every element by itself; torch's Adafactor takes no sharded parameters. In half
precision strategies round in different places, so that losses agree less; weights and moments are read bit by bit all the
same, except that ZeRO has frozen weights in half precision only.
"""

MEMORY = """## Memory

By how much the resident memory of a rank rises at most, where weights and optimizer state are in shards: {whole:.0f} MiB
of them on {ranks} ranks, {own:.0f} MiB each. Loading makes the optimizer state, {moments:.0f} MiB of that; an async save copies a
rank's own part. Under `zero1` and `zero2` every rank has the whole weights at any time, and DeepSpeed gathers them once more when
they were loaded.
"""


def table(head: list[str], rows: list[list[str]]) -> str:
    """In Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def page(found: dict[str, Any]) -> str:
    """The page of what `found` holds."""
    parts = [HEAD.format(seed=found["seed"])]
    if kill := found.get("kill"):
        rows = [[name, f"{number:,}"] for name, number in kill["kills"].items()]
        parts += [KILL.format(steps=runs.STEPS), table(["run", "kills"], [*rows, ["in all", f"{kill['in all']:,}"]])]
    if crash := found.get("crash"):
        rows = [[name, f"{number:,}"] for name, number in crash["ends"].items()]
        parts += [CRASH, table(["what was ended", "ends"], [*rows, ["in all", f"{sum(crash['ends'].values()):,}"]])]
    if corrupt := found.get("corrupt"):
        number = corrupt["mutations"]
        rows = [[name, f"{number[name]:,}"] for name in sorted(number, key=lambda name: (name == "unchanged", name))]
        parts += [
            CORRUPT.format(refusals=corrupt["refusals"]),
            table(["mutation", "refused"], [*rows, ["in all", f"{sum(number.values()):,}"]]),
        ]
    if variants := found.get("mutants"):
        kinds = Counter(variants["kinds"].values())
        parts += [
            MUTANTS.format(number=len(variants["kinds"])),
            table(
                ["taken out", "variants, all noticed"],
                [[kind, f"{kinds[kind]}"] for kind in mutants.VITAL],
            ),
        ]
    if cases := found.get("pairs"):
        names = [str(topology) for topology in pairs.TOPOLOGIES]
        rows = [[name, *(f"{cases['adamw'][name].get(other, 0):.1e}" for other in names)] for name in names]
        apart = {case: [a for readers in w.values() for a in readers.values()] for case, w in cases.items()}
        parts += [
            PAIRS.format(tolerance=pairs.TOLERANCE),
            table(["written by", *names], rows),
            MORE_PAIRS,
            table(
                ["case", "pairs", "losses apart", "allowed"],
                [
                    [case, f"{len(values)}", f"{max(values):.1e}", f"{pairs.CASES[case].tolerance:.0e}"]
                    for case, values in apart.items()
                    if case != "adamw"
                ],
            ),
        ]
    if rises := found.get("memory"):
        whole = memory.WHOLE / 2**20
        own = whole / memory.RANKS
        parts += [
            MEMORY.format(whole=whole, ranks=memory.RANKS, own=own, moments=own * 2 / 3),
            table(
                ["strategy, save", "MiB while saving", "MiB while loading"],
                [[name, f"{rise['saving']:.1f}", f"{rise['loading']:.1f}"] for name, rise in rises.items()],
            ),
        ]
    return "\n".join(parts)
