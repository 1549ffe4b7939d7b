"""Two hosts, as two network namespaces with a cable between them: they train together, and each notices the end of the other."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "hosts.py"
ADDRESSES = {"alpha": "10.231.77.1", "beta": "10.231.77.2"}
LEFT = {
    "beta": ("alpha", "rank 1 on beta did not answer rank 0 on alpha: dead, unreachable or stuck"),
    "alpha": ("beta", "rank 1 on beta lost its connection to rank 0 on alpha, which coordinates the ranks"),
}
"""By the host that is gone, the one that is left and what it says."""
LIMIT_SECONDS = 300
pytestmark = pytest.mark.timeout(4 * LIMIT_SECONDS + 60)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def cables() -> Iterator[dict[str, str]]:
    """By the host that will be gone, a prefix of the namespaces' names of a pair; each holds the interface "cable"."""
    prefixes = {gone: f"fabricate-{os.getpid()}-without-{gone}-" for gone in LEFT}
    try:
        for prefix in prefixes.values():
            for name in ADDRESSES:
                ip("netns", "add", prefix + name)
            inside = ["netns", prefix + "beta"]
            ip("link", "add", "cable", "netns", prefix + "alpha", "type", "veth", "peer", "name", "cable", *inside)
            for name, address in ADDRESSES.items():
                ip("-n", prefix + name, "address", "add", f"{address}/24", "dev", "cable")
                for interface in ("lo", "cable"):
                    ip("-n", prefix + name, "link", "set", interface, "up")
        yield prefixes
    finally:
        for prefix in prefixes.values():
            for name in ADDRESSES:
                subprocess.run(["ip", "netns", "delete", prefix + name], check=False, capture_output=True)


def start(prefix: str, name: str, folder: Path) -> subprocess.Popen[bytes]:
    """`fabricate run` on one host, which has a name of its own as well."""
    command = [sys.executable, "-m", "fabricate", "run", str(SCRIPT), "--nnodes", "2", "--nproc", "1"]
    command += ["--node-rank", str(list(ADDRESSES).index(name)), "--master-addr", ADDRESSES["alpha"]]
    shell = f"hostname {name}; exec {' '.join(command)}"
    with (folder / f"{name}.txt").open("wb") as output:
        return subprocess.Popen(
            ["ip", "netns", "exec", prefix + name, "unshare", "--uts", "sh", "-c", shell],
            env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )


def cut(prefix: str, name: str) -> None:
    """The host loses its cable, then its power: nobody tells the other one."""
    ip("-n", prefix + name, "link", "set", "cable", "down")
    listing = subprocess.run(["ip", "netns", "pids", prefix + name], check=True, capture_output=True, text=True)
    subprocess.run(["kill", "-9", *listing.stdout.split()], check=True)


def test_two_hosts_train_together_and_a_host_that_is_gone_is_named(cables: dict[str, str], tmp_path: Path) -> None:
    """Two pairs at the same time, because most of it is waiting."""
    running: dict[str, dict[str, subprocess.Popen[bytes]]] = {}
    try:
        for gone, prefix in cables.items():
            (tmp_path / gone).mkdir()
            running[gone] = {name: start(prefix, name, tmp_path / gone) for name in ADDRESSES}
        for gone, prefix in cables.items():
            trained, deadline = tmp_path / gone / "alpha.txt", time.monotonic() + LIMIT_SECONDS
            while "step 10 of 2 ranks\n" not in trained.read_text():
                assert all(process.poll() is None for process in running[gone].values()), trained.read_text()
                assert time.monotonic() < deadline
                time.sleep(0.1)
            cut(prefix, gone)
        for gone, (host, message) in LEFT.items():
            code = running[gone][host].wait(LIMIT_SECONDS)
            assert code != 0, "the time-out of the script is 15 seconds, torch's own half an hour"
            assert f"RankError: {message}" in (tmp_path / gone / f"{host}.txt").read_text()
    finally:
        for pair in running.values():
            for process in pair.values():
                process.kill()
                process.wait()
