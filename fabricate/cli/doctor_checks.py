"""Checks of what this machine and installation can do, made by trying it. `fabricate doctor` shows the results.

Owns the checks. `python -m fabricate.cli.doctor_checks` is one rank of the collective that it starts. Must not know: options and output,
the loop, Accelerate.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fabricate.errors import FabricateError, size_text
from fabricate.launch.config_files import read_config
from fabricate.launch.ranks import detect
from fabricate.launch.settings import requests
from fabricate.model.host_memory import host_memory

_PACKAGES = ("torch", "accelerate", "transformers", "datasets", "safetensors", "numpy", "pluggy")
_OPTIONAL = ("deepspeed", "torchao", "transformer_engine", "tensorboard", "torchmetrics")
_MEBIBYTES = 16
_SECONDS = 300.0
_ERROR = re.compile(r"^(?:\[rank\d+\]: )?([\w.]*(?:Error|Exception|SystemExit): .*)$", re.MULTILINE)


@dataclass(frozen=True)
class Finding:
    """The result of a check. `state`: "good", "absent" (not available, which is no fault) or "broken"."""

    topic: str
    state: str
    text: str


def examine(device_type: str | None = None) -> Iterator[Finding]:
    """All findings, topic by topic. `device_type`: "cpu" to ignore accelerators. Call it in one process; it starts two more for a short
    time."""
    checks: tuple[Callable[[str | None], Iterator[Finding]], ...] = (
        _versions,
        _devices,
        _precisions,
        _network,
        _collective,
        _plugins,
        _deepspeed_ops,
        _launcher,
        _accelerate_config,
    )
    for check in checks:
        topic = check.__name__.strip("_").replace("_", " ")
        try:
            with contextlib.redirect_stdout(sys.stderr):  # keeps the output of imported libraries out of stdout
                findings = list(check(device_type))
        except Exception as exc:  # an exception is a finding too: something that the check needs is broken
            text = str(exc) if isinstance(exc, FabricateError) else f"{type(exc).__name__}: {exc}"
            findings = [Finding(topic, "broken", text.strip())]
        yield from findings


def _versions(device_type: str | None) -> Iterator[Finding]:
    from fabricate import __version__

    yield Finding("fabricate", "good", f"{__version__}, Python {platform.python_version()}, {platform.platform()}")
    for package in (*_PACKAGES, *_OPTIONAL):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            required = package in _PACKAGES
            yield Finding(package, "broken" if required else "absent", "not installed")
            continue
        if package in _PACKAGES:
            try:
                importlib.import_module(package)
            except Exception as exc:
                yield Finding(package, "broken", f"{version} cannot be imported: {type(exc).__name__}: {exc}")
                continue
        yield Finding(package, "good", version)


def _device(device_type: str | None) -> Any:
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if device is None or device_type == "cpu" else device


def _devices(device_type: str | None) -> Iterator[Finding]:
    import torch

    memory, where = host_memory()
    cores = len(os.sched_getaffinity(0))
    yield Finding("host", "good", f"{cores} cores, {size_text(memory)} of memory ({where})")
    if _device(device_type).type == "cpu":
        built = torch.version.cuda or torch.version.hip
        yield Finding(
            "devices", "absent", f"no accelerator; this torch is {f'built for {built}' if built else 'a CPU build'}"
        )
        return
    if _device(device_type).type != "cuda":
        kind = f"{torch.accelerator.device_count()} of the kind {_device(device_type).type}"
        yield Finding("devices", "good", f"{kind}, on which fabricate was not yet run")
        return
    for number in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(number)
        capability = f"compute capability {device.major}.{device.minor}"
        yield Finding(f"device {number}", "good", f"{device.name}, {size_text(device.total_memory)}, {capability}")
    count = torch.cuda.device_count()
    linked = [(a, b) for a in range(count) for b in range(a) if torch.cuda.can_device_access_peer(a, b)]
    if count > 1:
        pairs = count * (count - 1) // 2
        yield Finding("between devices", "good", f"{len(linked)} of {pairs} pairs reach each other's memory directly")


def _precisions(device_type: str | None) -> Iterator[Finding]:
    import torch

    from fabricate.registry.registry import Registry

    device, registry = _device(device_type), Registry(tolerant=True)
    strategy = registry.resolve("strategy", "single")[0]
    seconds: dict[str, float] = {}
    for name in ("fp32", "bf16", "fp16"):
        precision = registry.resolve("precision", name)[0]
        if reasons := list(precision.check(device, strategy)):
            yield Finding(name, "absent", "; ".join(reasons))
            continue
        context = precision.forward_context(device)
        layer, x = torch.nn.Linear(1024, 1024, device=device), torch.randn(256, 1024, device=device)
        with torch.no_grad():
            result, seconds[name] = _timed(layer, x, context)
        computed = str(result.dtype).removeprefix("torch.")
        speed = f"{seconds['fp32'] / seconds[name]:.1f} times as fast as fp32" if name != "fp32" else "the measure"
        state = "good" if computed == precision.compute_dtype and bool(result.isfinite().all()) else "broken"
        yield Finding(name, state, f"computes in {computed} on {device}, {speed}")
    if device.type == "cuda":
        native = torch.cuda.get_device_capability(device) >= (8, 9)
        yield Finding(
            "fp8", "good" if native else "absent", "in hardware" if native else "needs compute capability 8.9"
        )
    else:
        yield Finding("fp8", "absent", "no CPU computes in float8. To try the rounding of float8, use fp8:emulate=true")


def _timed(layer: Any, x: Any, context: Any) -> tuple[Any, float]:
    """The output of `layer` for `x`, and the shortest of several measured times in seconds."""
    import torch

    def run() -> Any:
        with context or contextlib.nullcontext():
            output = layer(x)
        if x.device.type != "cpu":
            torch.accelerator.synchronize()
        return output

    result, best = run(), float("inf")
    for _ in range(5):
        begun = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begun)
    return result, best


def _network(device_type: str | None) -> Iterator[Finding]:
    name = socket.gethostname()
    try:
        addresses = sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None)})
    except OSError as exc:
        addresses, reason = (
            [],
            f"{name} has no address ({exc}), so other nodes cannot find it. Use --master-addr with an IP address",
        )
    else:
        reason = f"{name} is {', '.join(addresses)}"
    interfaces = sorted(n for _, n in socket.if_nameindex() if n != "lo")
    chosen = os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME")
    choice = f"; {chosen} is chosen by the environment" if chosen else ""
    yield Finding(
        "network",
        "good" if addresses else "absent",
        f"{reason}; interfaces {', '.join(interfaces) or 'lo only'}{choice}",
    )
    adapters = sorted(p.name for p in Path("/sys/class/infiniband").glob("*"))
    yield Finding("infiniband", "good" if adapters else "absent", ", ".join(adapters) or "no adapter")


def _collective(device_type: str | None) -> Iterator[Finding]:
    import torch

    backends = ["gloo"]
    if _device(device_type).type == "cuda" and torch.cuda.device_count() > 1:
        backends.append("nccl")
    for backend in backends:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        environment = {
            k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
        }
        try:
            done = subprocess.run(
                [*launch, "-m", "fabricate.cli.doctor_checks", backend],
                env=environment | {"OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=_SECONDS,
            )
        except subprocess.TimeoutExpired:
            yield Finding(
                f"2 ranks, {backend}",
                "broken",
                f"did not connect within {_SECONDS:g} s. Check whether a firewall blocks connections between processes",
            )
            continue
        lines = [line for line in done.stdout.splitlines() if line.startswith("2 ranks")]
        if done.returncode or not lines:
            errors = _ERROR.findall(done.stderr) or done.stderr.strip().splitlines() or ["no output"]
            yield Finding(f"2 ranks, {backend}", "broken", f"exit code {done.returncode}: {errors[0]}")
        else:
            yield Finding(f"2 ranks, {backend}", "good", lines[0].removeprefix("2 ranks "))


def _rank(backend: str) -> None:
    """Run one of the two ranks: a sum over both, checked and timed."""
    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    device = torch.device("cpu") if backend == "gloo" else torch.device("cuda", rank)
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=_SECONDS / 2))
    values = torch.full((_MEBIBYTES * 2**18,), float(rank + 1), device=device)
    begun = time.perf_counter()
    dist.all_reduce(values)
    right = bool((values == 3).all())
    seconds = time.perf_counter() - begun
    dist.barrier()
    dist.destroy_process_group()
    if not right:
        raise SystemExit(f"the sum over ranks is wrong on rank {rank}: {values[:3].tolist()}, expected 3")
    if rank == 0:
        print(f"2 ranks summed {_MEBIBYTES} MiB in {1000 * seconds:.0f} ms", flush=True)


def _plugins(device_type: str | None) -> Iterator[Finding]:
    from fabricate.registry.registry import Registry

    rows = Registry(tolerant=True).describe()
    for row in rows:
        text = f"{row.distribution} {row.version}: {', '.join(row.offers) or 'offers nothing'}"
        yield Finding(
            f"plugin {row.name}", "broken" if row.state == "broken" else "good", row.reason or f"{text}, {row.state}"
        )


def _deepspeed_ops(device_type: str | None) -> Iterator[Finding]:
    if importlib.util.find_spec("deepspeed") is None:
        yield Finding("deepspeed ops", "absent", "DeepSpeed is not installed")
        return
    versions: Any = importlib.import_module("deepspeed.git_version_info")
    ready = sorted(name for name, built in versions.installed_ops.items() if built)
    compiler = [tool for tool in ("ninja", "g++") if shutil.which(tool)]
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    cached = sorted({path.stem for path in folder.rglob("*.so")}) if folder.exists() else []
    ops = f"built with it: {', '.join(ready) or 'none'}; compiled before: {', '.join(cached) or 'none'}"
    if len(compiler) == 2:
        yield Finding("deepspeed ops", "good", f"{ops}; others are compiled when first used")
    else:
        missing = " and ".join({"ninja", "g++"} - set(compiler))
        yield Finding("deepspeed ops", "absent", f"{ops}; others cannot be compiled: {missing} missing")


def _launcher(device_type: str | None) -> Iterator[Finding]:
    launch = detect(os.environ)
    requested = ", ".join(
        f"{name}={request.value} ({request.source})" for name, request in requests(os.environ).items()
    )
    yield Finding(
        "launcher",
        "good",
        f"{launch.launcher}, rank {launch.rank} of {launch.world_size}; asked for: {requested or 'nothing'}",
    )


def _accelerate_config(device_type: str | None) -> Iterator[Finding]:
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    files = [Path(home) / "accelerate" / f"default_config.{kind}" for kind in ("yaml", "json")]
    file = next((path for path in files if path.exists()), None)
    topic = "accelerate config"
    if file is None:
        yield Finding(topic, "absent", f"none at {files[0]}")
        return
    config = read_config(str(file))
    values = {
        "strategy": config.strategy,
        "precision": config.precision,
        "processes": config.num_processes,
        "nodes": config.num_nodes,
        **config.variables,
    }
    text = ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)
    how = f"in force under `accelerate launch`; `fabricate run --config {file}` reads it"
    yield Finding(topic, "good", f"{file}: {text or 'asks for nothing'}; {how}")


if __name__ == "__main__":
    _rank(sys.argv[1])
