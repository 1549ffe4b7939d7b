"""Markdown tables of the figures, and a description of the machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VERSIONS = (
    "torch",
    "accelerate",
    "transformers",
    "lightning",
    "pytorch-lightning",
    "deepspeed",
    "torchao",
    "pytorch-accelerated",
    "pytorch-ignite",
)


def machine() -> dict[str, Any]:
    """The processor, cores, memory, present load, and versions of packages."""
    processor = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        processor = names[0] if names else processor
    versions = {}
    for name in VERSIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "processor": processor,
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "versions": versions,
    }


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _overhead(case: dict[str, Any]) -> str:
    rows = []
    for name, loop in case["loops"].items():
        low, high = loop["quartiles"]
        over = f"{loop['overhead']:+.1f} [{low:+.0f}, {high:+.0f}]" if name != "bare PyTorch" else "0"
        rows.append(
            [
                name,
                f"{loop['micro_batch']:.1f}",
                over,
                f"{loop['best_case']:+.1f}",
                f"{loop['typical']:+.1f}",
                f"{loop['ratio']:.3f}",
                loop["weights"],
            ]
        )
    head = [
        "loop",
        "us per micro-batch",
        "over bare, median [quartiles]",
        "best case",
        "median step",
        "ratio",
        "final weights",
    ]
    return table(head, rows) + f"\n{case['rounds']} rounds of {case['micro_batches']} micro-batches.\n"


def _startup(figures: dict[str, Any]) -> dict[str, str]:
    imports = [
        [f"`{statement}`", f"{f['cpu_seconds']:.2f}", f"{f['modules']:.0f}", f"{f['peak_mib']:.0f}"]
        for statement, f in figures["imports"].items()
    ]
    base = figures["first_step"]["bare PyTorch"]
    first = [
        [
            name,
            f"{f['cpu_seconds']:.2f}",
            f"{f['cpu_seconds'] - base['cpu_seconds']:+.2f}",
            f"{f['peak_mib']:.0f}",
            f"{f['peak_mib_gpt']:.0f}",
            f"{f['frames']:.0f}",
        ]
        for name, f in figures["first_step"].items()
    ]
    shares = list(next(iter(figures["resume"].values())))
    resume = [[name, *(f"{f[share]:.3f}" for share in shares)] for name, f in figures["resume"].items()]
    return {
        "imports": table(["statement", "CPU seconds", "modules", "peak MiB"], imports),
        "first step": table(
            [
                "loop",
                "CPU seconds to the end of step 1",
                "over bare",
                "peak MiB",
                "peak MiB, language model",
                "frames above the step",
            ],
            first,
        ),
        "resume": table(["method", *(f"at {share}" for share in shares)], resume),
    }


def tables(results: dict[str, Any]) -> dict[str, str]:
    """The Markdown tables by the names of their markers in docs/benchmarks.md. results: for each part, its figures ("found"), the printed
    "text" and the "machine"."""
    texts: dict[str, str] = {}
    for part, result in results.items():
        measurements = result["found"]
        if part == "overhead":
            texts |= {case: _overhead(figures) for case, figures in measurements.items()}
        elif part == "startup":
            texts |= _startup(measurements)
        else:
            texts[part] = result["text"]
    if results:
        lines = [
            f"- {part}: {m['processor']}, {m['cores']} cores, {m['memory_gib']} GiB, load {m['load']} at the start; "
            f"Python {m['python']}, {', '.join(f'{n} {v}' for n, v in m['versions'].items())}"
            for part, m in ((part, result["machine"]) for part, result in results.items())
        ]
        texts["machine"] = "\n".join(lines) + "\n"
    return texts
