"""The shared parts of the GPU campaign's scripts: the device with its clock and memory, the counter of waits, the report.

`device` chooses a `Host` or `Cuda` object once, by `--device`; scripts use it instead of torch.cuda. `Report` runs the cases within the
remaining time, writes the JSON file after each case and ends the process with the verdict.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch

from benchmarks.tables import machine, table
from campaigns.gpu import ROOT

PEAKS = {"H200": 989.0, "H100 80GB": 989.0, "GH200": 989.0, "A100": 312.0, "L40S": 362.0, "L4": 121.0, "4090": 165.0}
"""Dense bf16 TFLOP/s by a part of the device's name, from the makers' data sheets; for other devices pass --peak."""
PACKAGES = ("accelerate", "click", "numpy", "pluggy", "psutil", "rich", "safetensors", "transformers", "xxhash", "yaml")
"""The packages that fabricate imports."""
_WAIT = "called a synchronizing CUDA operation"
_CALLS = re.compile(r"cuda(Stream|Device|Event)Synchronize|cudaMemcpy$|cudaMalloc$|cudaFree$")


# ------------------------------------------------------------------------------------------------------------ the device


class Host:
    """A CPU, for a rehearsal, which shows that a script runs. Memory and waits are not counted and are 0."""

    kind: ClassVar[str] = "cpu"
    real: ClassVar[bool] = False
    """Whether figures are of a GPU."""

    def __init__(self) -> None:
        self.device = torch.device(self.kind)
        self.name = "no GPU"
        self.peak: float | None = None
        """Dense bf16 TFLOP/s."""

    def group_backend(self) -> str:
        """The backend of a process group whose ranks may share this device."""
        return "cpu:gloo"

    def synchronize(self) -> None:
        """Wait for all queued work."""

    def clock(self) -> Callable[[], float]:
        """Start a clock, and return a function that waits for the queued work and returns the milliseconds since the start."""
        began = time.perf_counter()
        return lambda: 1000 * (time.perf_counter() - began)

    def reset_peak(self) -> None:
        """Reset the peak of memory."""

    def allocated(self) -> int:
        """The bytes of all tensors now."""
        return 0

    def peak_allocated(self) -> int:
        """The largest number of bytes of all tensors since `reset_peak`."""
        return 0

    def forget(self) -> None:
        """Release cached memory."""

    @contextlib.contextmanager
    def waits(self) -> Iterator[collections.Counter[str]]:
        """While entered, count the waits of the host for the device, by "file:line" of the innermost frame outside of torch."""
        yield collections.Counter()

    @contextlib.contextmanager
    def traced(self) -> Iterator[dict[str, float]]:
        """While entered, record a profile. Afterwards the mapping holds the calls of CUDA's runtime that may wait, and "idle", the share of
        time without a kernel. Empty without a GPU."""
        yield {}


class Cuda(Host):
    """The NVIDIA GPU with index 0."""

    kind = "cuda"
    real = True

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("cuda", 0)
        self.name = torch.cuda.get_device_name(0)
        self.peak = next((peak for part, peak in PEAKS.items() if part in self.name), None)

    def group_backend(self) -> str:
        return "cpu:gloo,cuda:gloo"

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def clock(self) -> Callable[[], float]:
        torch.cuda.synchronize()
        began = torch.cuda.Event(enable_timing=True)
        began.record()

        def read() -> float:
            ended = torch.cuda.Event(enable_timing=True)
            ended.record()
            ended.synchronize()
            return began.elapsed_time(ended)

        return read

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def allocated(self) -> int:
        return torch.cuda.memory_allocated()

    def peak_allocated(self) -> int:
        return torch.cuda.max_memory_allocated()

    def forget(self) -> None:
        torch.cuda.empty_cache()

    @contextlib.contextmanager
    def waits(self) -> Iterator[collections.Counter[str]]:
        counter: collections.Counter[str] = collections.Counter()
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            others = warnings.showwarning

            def note(message: Any, *where: Any, **more: Any) -> None:
                if _WAIT in str(message):
                    counter[_place()] += 1
                elif "Synchronization debug mode" not in str(message):
                    others(message, *where, **more)

            warnings.showwarning = note  # type: ignore[assignment]
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield counter
            finally:
                torch.cuda.set_sync_debug_mode("default")

    @contextlib.contextmanager
    def traced(self) -> Iterator[dict[str, float]]:
        from torch.profiler import ProfilerActivity, profile

        figures: dict[str, float] = {}
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            yield figures
            torch.cuda.synchronize()
        calls: collections.Counter[str] = collections.Counter()
        spans = []
        for event in profiler.events() or ():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                if event.is_user_annotation:  # covers kernels and the time between them
                    continue
                spans.append((event.time_range.start, event.time_range.end))
            elif _CALLS.match(event.name):
                calls[event.name] += 1
        figures |= calls
        figures["idle"] = idle_share(spans)


def idle_share(spans: list[tuple[float, float]]) -> float:
    """The share of the time from the first span's begin to the last one's end that no span covers. 0 without spans."""
    covered, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    whole = until - min((begin for begin, _ in spans), default=until)
    return 1 - covered / whole if whole > 0 else 0.0


def _place() -> str:
    """The place of the innermost frame that belongs neither to torch nor to this file nor to `warnings`."""
    for frame in reversed(traceback.extract_stack()[:-2]):
        if "/torch/" not in frame.filename and not frame.filename.endswith(
            ("warnings.py", "campaigns/gpu/measuring.py")
        ):
            path = Path(frame.filename)
            return f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name}:{frame.lineno}"
    return "elsewhere"


class Window:
    """Measures the updates between `first` and `first + updates`; called after each update. waits: count waits of the host instead of time,
    because counting changes the time."""

    def __init__(self, device: Host, first: int, updates: int, waits: bool = False) -> None:
        self._device, self._first, self._last, self._counts = device, first, first + updates, waits
        self._open = contextlib.ExitStack()
        self._read: Callable[[], float] = float
        self.updates = updates
        self.milliseconds = 0.0
        """Milliseconds per update, by the device's clock."""
        self.peak = 0
        """The largest number of bytes of tensors in these updates."""
        self.waits: collections.Counter[str] = collections.Counter()
        self.trace: dict[str, float] = {}

    def updated(self, step: int) -> None:
        """To be called when update `step`, from 1, is queued."""
        if step == self._first:
            self._device.reset_peak()
            if self._counts:
                self.trace = self._open.enter_context(self._device.traced())
                self.waits = self._open.enter_context(self._device.waits())
            else:
                self._read = self._device.clock()
        elif step == self._last:
            self._open.close()
            self.milliseconds = self._read() / self.updates
            self.peak = self._device.peak_allocated()

    @property
    def needs(self) -> int:
        """The updates that a loop has to run: one more than the last counted one, so that the end of the loop is not counted."""
        return self._last + 1


# ------------------------------------------------------------------------------------------------------------ the report


def arguments(description: str | None, seconds: float) -> argparse.ArgumentParser:
    """The options that every script has."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal on tiny sizes")
    parser.add_argument("--seconds", type=float, default=seconds, help="begin no case that would not end by then")
    parser.add_argument("--out", type=Path, help="a folder for the figures; they are written as they come")
    parser.add_argument("--only", nargs="+", metavar="CASE", help="cases whose names begin so")
    parser.add_argument("--peak", type=float, help="the GPU's dense bf16 TFLOP/s, where its name does not say")
    return parser


def device(options: argparse.Namespace) -> Host:
    """The device of this run. Ends the process with exit code 2 if there is none or a package is missing."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        print(f"not run: these packages are missing here: {', '.join(missing)}", file=sys.stderr)
        raise SystemExit(2)
    if options.device == "cpu":
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
        return Host()
    if not torch.cuda.is_available():
        print("not run: torch sees no NVIDIA GPU; --device cpu rehearses", file=sys.stderr)
        raise SystemExit(2)
    cuda = Cuda()
    cuda.peak = options.peak or cuda.peak
    return cuda


class LeftOut(Exception):
    """A case that cannot run here, with the reason."""


class Report:
    """The figures and verdicts of one script. `figures` of a case are a mapping of JSON values."""

    def __init__(self, name: str, device: Host, options: argparse.Namespace) -> None:
        self.name, self.device, self._only = name, device, tuple(options.only or ())
        self._ends, self._began = time.monotonic() + options.seconds, time.monotonic()
        self._file = options.out / f"{name}.json" if options.out is not None else None
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
        self.cases: dict[str, dict[str, Any]] = {}
        self._head = {
            "script": name, "device": device.name, "rehearsal": not device.real, "peak_tflops": device.peak,
            "machine": machine(), "command": sys.argv[1:],
        }  # fmt: skip

    def left(self) -> float:
        """The remaining seconds of the budget."""
        return self._ends - time.monotonic()

    def chosen(self, name: str) -> bool:
        """Whether `--only` includes this case."""
        return not self._only or name.startswith(self._only)

    def case(
        self, name: str, function: Callable[..., dict[str, Any]], *args: Any, takes: float = 15.0
    ) -> dict[str, Any]:
        """Run one case and keep its figures; "failed" in them lists what is wrong, and an exception is a failure too.

        takes: seconds that it may need on a GPU; with less time left it is left out. Returns the figures, empty if there are none.
        """
        if not self.chosen(name):
            return {}
        began, figures = time.monotonic(), dict[str, Any]()
        try:
            if self.left() < (takes if self.device.real else 0):
                raise LeftOut(f"{self.left():.0f} s left, it may take {takes:.0f}")
            figures = function(*args)
        except LeftOut as exc:
            figures = {"left_out": str(exc)}
        except Exception as exc:  # an error of one case must not end the others
            traceback.print_exc()
            figures = {"failed": [f"{type(exc).__name__}: {exc}"[:2000]]}
        self.record(name, {**figures, "seconds": round(time.monotonic() - began, 2)})
        return figures if not figures.keys() & {"left_out", "failed"} else {}

    def record(self, name: str, figures: dict[str, Any]) -> None:
        """Keep the figures of a case, write the file, print a line."""
        self.cases[name] = figures
        self.write()
        verdict = "left out" if "left_out" in figures else "FAILED" if figures.get("failed") else "ok"
        reason = _short(figures.get("left_out") or figures.get("failed") or "")
        print(f"{self.name}: {name}: {verdict}{': ' + reason if reason else ''}", file=sys.stderr, flush=True)

    def write(self) -> None:
        """Write the JSON file with the cases so far, atomically."""
        if self._file is None:
            return
        whole = {
            **self._head,
            "seconds": round(time.monotonic() - self._began, 1),
            "verdict": self.verdict(),
            "cases": self.cases,
        }
        beside = self._file.with_suffix(".part")
        beside.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
        beside.replace(self._file)

    def verdict(self) -> str:
        """ "failed" if a case failed, "incomplete" if one was left out, else "passed". A rehearsal may leave out what needs a GPU."""
        if any(figures.get("failed") for figures in self.cases.values()):
            return "failed"
        left_out = self.device.real and any("left_out" in figures for figures in self.cases.values())
        return "incomplete" if left_out else "passed"

    def end(self, header: list[str], rows: list[list[str]]) -> int:
        """Print the table and the verdict. Exit code: 0 passed, 1 failed, 3 a case was left out and none failed."""
        self.write()
        print(table(header, rows))
        for kind in ("failed", "left_out"):
            for name, figures in self.cases.items():
                if figures.get(kind):
                    print(f"{kind.replace('_', ' ')}: {name}: {_short(figures[kind])}")
        verdict = self.verdict()
        versions = ", ".join(f"{name} {version}" for name, version in self._head["machine"]["versions"].items())
        where = self.device.name if self.device.real else "a rehearsal: no figure here says anything about a GPU"
        print(f"{self.name}: {verdict}; {time.monotonic() - self._began:.0f} s; {where}; {versions}.")
        return {"passed": 0, "failed": 1, "incomplete": 3}[verdict]


def _short(reason: str | list[str]) -> str:
    return reason[:300] if isinstance(reason, str) else "; ".join(str(each)[:300] for each in reason)


# ---------------------------------------------------------------------------------------------------------- processes


def needs(*packages: str) -> None:
    """Leave the case out unless `packages` can be imported."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise LeftOut(f"not installed here: {', '.join(missing)}")


def started(command: list[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a process for at most `seconds`, with stdout and stderr together. After that time it gets SIGTERM, which torchrun passes on to
    its ranks, and the exit code is 124."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
        code = None
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return subprocess.CompletedProcess(command, 124 if code is None else code, output.read())


_MARK = "figures: "


def emit(figures: dict[str, Any]) -> None:
    """Print figures for the process that started this one."""
    print("\n" + _MARK + json.dumps(figures), flush=True)


def emitted(output: str) -> dict[str, Any]:
    """The figures that a process passed to `emit`, read from its output; empty if it did not call `emit`."""
    line = next((line for line in output.splitlines() if line.startswith(_MARK)), _MARK + "{}")
    figures: dict[str, Any] = json.loads(line.removeprefix(_MARK))
    return figures


def last_error(process: subprocess.CompletedProcess[str]) -> str:
    """The exit code and the last line of the output that names an exception, except torchrun's own."""
    named = re.findall(r"^(?:\[rank\d+\]: ?)?([\w.]*(?:Error|Exception|Lost)\b.*)$", process.stdout, re.MULTILINE)
    own = [line for line in named if "torch.distributed.elastic" not in line]
    return f"exit code {process.returncode}: {own[-1] if own else process.stdout[-300:].strip()}"


def torchrun(ranks: int, module: str, *arguments: str) -> list[str]:
    """The command that runs `module` on `ranks` ranks of this machine."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        "-m",
        module,
        *arguments,
    ]
