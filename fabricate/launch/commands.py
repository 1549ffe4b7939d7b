"""The start of one process per rank: the command line, its environment, and the report of a fit to its launcher at the end.

Must not know how a rank finds its place (`ranks`), nor devices. The command starts `fabricate.cli.runner`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fabricate.errors import ConfigurationError

PREEMPTED_FILE = "FABRICATE_PREEMPTED_FILE"
"""The variable with the path of the file in which a fit reports to its launcher, `fabricate.cli.runner`, that a signal ended it."""

SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""torchrun's variable: the seconds that ranks have to end after torchrun's first signal, before it kills them."""


def tell_preempted(environ: Mapping[str, str], by: str) -> None:
    """Write `by`, the signal that ended a fit, into the file for `fabricate.cli.runner`; remove the file if no signal did (`by` is empty).

    Does nothing under other launchers. One process of each node calls this.
    """
    if file := environ.get(PREEMPTED_FILE):
        Path(file).unlink(missing_ok=True)
        if by:
            Path(file).write_text(by)


def command(
    script: str,
    arguments: Sequence[str],
    *,
    nproc: int | str,
    nnodes: int = 1,
    node_rank: int = 0,
    master_addr: str | None = None,
    master_port: int | None = None,
    numa_binding: str | None = None,
    max_restarts: int = 0,
    python: str = sys.executable,
) -> list[str]:
    """The command line that runs `script` on `nproc` ranks of this node. A run of one rank, without `numa_binding` and `max_restarts`, is
    one process. Otherwise torchrun starts the ranks: it counts devices for "gpu" and "auto", binds ranks to the cores near their GPUs
    (`numa_binding`), and after a failure restarts all ranks, up to `max_restarts` times.

    Raises ConfigurationError for impossible counts, and for several nodes without the address of the first.

        command("train.py", ["--lr", "0.1"], nproc=1)[2:] == ["fabricate.cli.runner", "--alone", "--", "train.py", "--lr", "0.1"]
    """
    _check_places(nproc, nnodes, node_rank, master_addr)
    runner = [python, "-m", "fabricate.cli.runner"]
    if nproc == nnodes == 1 and numa_binding is None and not max_restarts:
        return [*runner, "--alone", "--", script, *arguments]
    if nnodes == 1 and master_addr is None and master_port is None:
        meeting = ["--standalone"]
    else:
        address, port = master_addr or "127.0.0.1", str(master_port or 29500)
        meeting = ["--nnodes", str(nnodes), "--node-rank", str(node_rank)]
        meeting += (
            _restarting(address, port, node_rank) if max_restarts else ["--master-addr", address, "--master-port", port]
        )
    given = {"--numa-binding": numa_binding, "--max-restarts": max_restarts or None, "--nproc-per-node": nproc}
    options = [text for option, value in given.items() if value is not None for text in (option, str(value))]
    # Without "--", torchrun reads an argument of the script as an abbreviated option: "ambiguous option: --log".
    return [*runner, *meeting, *options, "--module", "--", "fabricate.cli.rank", script, *arguments]


def _restarting(address: str, port: str, node_rank: int) -> list[str]:
    """The options by which nodes meet that may restart. With torchrun's static rendezvous, the ranks would find each other's addresses from
    before the restart, and nodes would not notice that another one restarts."""
    options = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{address}:{port}", "--rdzv-id", "fabricate"]
    return [*options, "--rdzv-conf", f"is_host={int(node_rank == 0)}"]


def _check_places(nproc: int | str, nnodes: int, node_rank: int, master_addr: str | None) -> None:
    if (isinstance(nproc, int) and nproc < 1) or nnodes < 1:
        raise ConfigurationError(f"--nproc {nproc} --nnodes {nnodes}: a run needs at least one process and one node")
    if not 0 <= node_rank < nnodes:
        raise ConfigurationError(f"--node-rank {node_rank} --nnodes {nnodes}: node ranks count from 0 to {nnodes - 1}")
    if nnodes > 1 and master_addr is None:
        raise ConfigurationError(
            f"--nnodes {nnodes} without --master-addr: give the host of node rank 0, the same value on every node"
        )


def listed_plugins(text: str) -> list[str]:
    """The plugins in a value of FABRICATE_PLUGINS: ";" separates plugins, "," separates the options of a plugin.

    listed_plugins("ema:decay=0.9,start=10; no:wandb") == ["ema:decay=0.9,start=10", "no:wandb"]
    """
    plugins = [plugin.strip() for plugin in text.split(";") if plugin.strip()]
    for plugin in plugins:
        name, comma, _ = plugin.partition(",")
        if comma and ":" not in name.removeprefix("no:"):
            raise ConfigurationError(
                f"plugins: {plugin!r} is not a name. Separate plugins with a semicolon (FABRICATE_PLUGINS='ema:decay=0.9,start=10;wandb'), "
                "or repeat --plugin"
            )
    return plugins


def environment(
    base: Mapping[str, str],
    *,
    nproc: int | str = 1,
    strategy: str | None = None,
    precision: str | None = None,
    plugins: Sequence[str] = (),
    shutdown_timeout: int | None = None,
    max_restarts: int = 0,
    plan_only: bool = False,
    variables: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """`base` plus the variables that pass these settings to the ranks and to torchrun; `base` itself is not changed.

    `plugins` are added to those in `base`. Raises ConfigurationError if `base` has another value for a setting.

        environment(os.environ, strategy="zero3")["FABRICATE_STRATEGY"] == "zero3"
    """
    for plugin in plugins:
        if ";" in plugin or len(listed_plugins(plugin)) != 1:
            raise ConfigurationError(f"--plugin {plugin!r}: give one plugin and repeat --plugin for each of them")
    wanted = {"FABRICATE_STRATEGY": strategy, "FABRICATE_PRECISION": precision, **(variables or {})}
    wanted[SHUTDOWN_TIMEOUT] = None if shutdown_timeout is None else str(shutdown_timeout)
    result = dict(base)
    for name, value in wanted.items():
        if value is None:
            continue
        if base.get(name, value) != value:
            raise ConfigurationError(
                f"{name}: the environment sets {base[name]!r} and this command {value!r}; unset one of them"
            )
        result[name] = value
    if plugins:
        listed = listed_plugins(base.get("FABRICATE_PLUGINS", ""))
        result["FABRICATE_PLUGINS"] = ";".join(dict.fromkeys([*listed, *plugins]))
    if plan_only:
        result["FABRICATE_PLAN_ONLY"] = "1"
    result["FABRICATE_LAUNCHED"] = "1"
    # Ranks meet at a store of torchrun's, whose port no other program can take. It would keep keys from before a restart.
    if max_restarts:
        result["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if isinstance(nproc, int) and nproc > 1:  # one process keeps torch's own choice, as under plain Python
        result.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // nproc)))
    return result
