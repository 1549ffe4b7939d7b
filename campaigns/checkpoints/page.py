"""The page of the documentation with the results of the campaigns."""

from __future__ import annotations

from collections import Counter
from typing import Any

from campaigns.checkpoints import memory, mutants, pairs, runs

HEAD = """# Reliability: how checkpoints were attacked, and the results

`python -m campaigns.checkpoints --long --out docs/reliability.md` wrote this page, with seed {seed}, on a CPU.
`make campaign` repeats it, and `make test` runs a sample of each part. A campaign ends with an error if anything is
lost, differs or goes unnoticed. So the numbers on this page count attempts, and all of them passed.
[Checkpoints](checkpoints.md) states what fabricate promises, [checkpoint-format](checkpoint-format.md) describes the
files.
"""

KILL = """## Real kills

Real runs are killed with SIGKILL and started again until they are done. A kill comes at a random moment, from the first
instruction of the run to after its end, or at a chosen call of the file system in a save, a deletion or a resume:
before the call, or, for a write, in the middle of it. It hits one rank or all of them, and up to five times per run, so
that resumes are interrupted too.

A run has {steps} updates with dropout, running statistics, augmentation from every random generator, accumulation, a
schedule, validation and a plugin with state. It saves at every second update and keeps two checkpoints.

Every run ended bitwise like a run that was not interrupted: weights, optimizer, random generators, metrics, exported
model, plugin state and the checkpoints on disk. No kill lost a checkpoint, and no temporary files remained.
"""

CRASH = """## A crash after every file operation

The file operations of a save, of a deletion, of a start after a kill and of a start after damage are recorded. For each
operation, the campaign then reproduces the files that a crash right after this operation would leave on disk. There are
two kinds of crash:

- a kill: all operations before it are on disk, and the last write may be there in part;
- a power cut: of everything that was not synced, any part may be on disk, such as some bytes of a file, or the changes
  of a directory up to some point.

In every case, four things held: every listed checkpoint was complete; the old or the new checkpoint was there; a save
that had returned was there; and the next start cleaned up and could save.
"""

CORRUPT = """## Altered and forged checkpoints

Two kinds of damage are tried. Bytes of any file, the manifest included, are altered as a faulty disk does. Manifests
are forged with a correct digest, which only an attacker does. Every altered checkpoint was either refused with a
`CheckpointError`, or it was read with exactly the original values because the alteration changed nothing (row
"unchanged", for instance zeros written over zeros). Another {refusals} hand-made cases were refused: links, pipes, file
names that point elsewhere, ranks that disagree.
"""

MUTANTS = """## The code without one of its precautions

In `fabricate.checkpoint`, each `fsync`, each `rename`, each digest, and each check that the chunks of a tensor cover
all of it is removed, one at a time. For all {number} variants of the code, the campaigns above or the tests of the
format failed, as they should. (In the table, "durable" means `fsync` and `rename`, and "coverage" the checks of
chunks.)
"""

PAIRS = """## Every checkpoint under every strategy

A *topology* is a strategy and a number of ranks. In the table below, the topology of the row writes a checkpoint in the
middle of an epoch, and the topology of the column resumes from it. In every pair, saving again what was loaded gave the
same bits (weights, optimizer state, schedule, progress), and the samples followed in the same order. The table shows
how far the losses of the following updates were from those of one process that was not interrupted: the largest
relative difference; at most {tolerance:.0e} is allowed. The runs use AdamW in float32, tied weights, a frozen layer,
two parameter groups, and sizes that are not divisible by any number of ranks.
"""

MORE_PAIRS = """The same was done with other optimizers and dtypes, with one pair for each topology instead of all
pairs: each topology writes one checkpoint, which the next topology reads. Some pairs are missing. ZeRO refuses Lion and
Adafactor: it accepts only optimizers that are known to treat every element independently. torch's Adafactor does not
accept sharded parameters. In half precision, strategies round at different places, so the losses agree less closely.
Weights and moments are still read without the loss of a bit, with one exception: of frozen weights, ZeRO keeps only a
copy in half precision.
"""

MEMORY = """## Memory

The table shows the largest increase of a rank's resident memory during a save and a load, for strategies that shard
weights and optimizer state. These take {whole:.0f} MiB in total, {own:.0f} MiB on each of {ranks} ranks; {moments:.0f}
MiB of a rank's part is optimizer state. Loading creates the optimizer state, which is included in the increase. An
async save copies the rank's part. Strategies that do not shard the weights are not in the table: under `zero1` and
`zero2` every rank always holds all weights, and DeepSpeed gathers them once more after loading.
"""


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def page(results: dict[str, Any]) -> str:
    """The text of the page for `results`."""
    parts = [HEAD.format(seed=results["seed"])]
    if kill := results.get("kill"):
        rows = [[name, f"{number:,}"] for name, number in kill["kills"].items()]
        parts += [KILL.format(steps=runs.STEPS), table(["run", "kills"], [*rows, ["in all", f"{kill['in all']:,}"]])]
    if crash := results.get("crash"):
        rows = [[name, f"{number:,}"] for name, number in crash["ends"].items()]
        parts += [CRASH, table(["what was ended", "ends"], [*rows, ["in all", f"{sum(crash['ends'].values()):,}"]])]
    if corrupt := results.get("corrupt"):
        number = corrupt["mutations"]
        rows = [[name, f"{number[name]:,}"] for name in sorted(number, key=lambda name: (name == "unchanged", name))]
        parts += [
            CORRUPT.format(refusals=corrupt["refusals"]),
            table(["mutation", "checkpoints"], [*rows, ["in all", f"{sum(number.values()):,}"]]),
        ]
    if variants := results.get("mutants"):
        kinds = Counter(variants["kinds"].values())
        parts += [
            MUTANTS.format(number=len(variants["kinds"])),
            table(
                ["taken out", "variants, all noticed"],
                [[kind, f"{kinds[kind]}"] for kind in mutants.VITAL],
            ),
        ]
    if cases := results.get("pairs"):
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
    if rises := results.get("memory"):
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
