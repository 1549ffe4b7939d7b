"""Two hosts, as two network namespaces with a cable between them: they train together, and one notices when the other is gone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "hosts.py"
ADDRESSES = {"alpha": "10.231.77.1", "beta": "10.231.77.2"}
LIMIT_SECONDS = 300
pytestmark = pytest.mark.timeout(2 * LIMIT_SECONDS + 60)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def cable() -> Iterator[str]:
    """A prefix of the namespaces' names; each holds the interface "cable"."""
    prefix = f"fabricate-{os.getpid()}-"
    try:
        for name in ADDRESSES:
            ip("netns", "add", prefix + name)
        inside = ["netns", prefix + "beta"]
        ip("link", "add", "cable", "netns", prefix + "alpha", "type", "veth", "peer", "name", "cable", *inside)
        for name, address in ADDRESSES.items():
            ip("-n", prefix + name, "address", "add", f"{address}/24", "dev", "cable")
            for interface in ("lo", "cable"):
                ip("-n", prefix + name, "link", "set", interface, "up")
        yield prefix
    finally:
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
    found = subprocess.run(["ip", "netns", "pids", prefix + name], check=True, capture_output=True, text=True)
    subprocess.run(["kill", "-9", *found.stdout.split()], check=True)


@pytest.mark.parametrize(
    ("gone", "left", "message"),
    [
        ("beta", "alpha", "rank 1 on beta did not answer rank 0 on alpha: dead, unreachable or stuck"),
        ("alpha", "beta", "rank 1 on beta lost rank 0 on alpha, where ranks meet"),
    ],
)
def test_two_hosts_train_together_and_a_host_that_is_gone_is_named(
    cable: str, tmp_path: Path, gone: str, left: str, message: str
) -> None:
    running = {name: start(cable, name, tmp_path) for name in ADDRESSES}
    output = {name: tmp_path / f"{name}.txt" for name in ADDRESSES}
    begin = time.monotonic()
    try:
        while "step 10 of 2 ranks\n" not in output["alpha"].read_text():
            assert all(process.poll() is None for process in running.values()), output["alpha"].read_text()
            assert time.monotonic() < begin + LIMIT_SECONDS
            time.sleep(0.1)
        cut(cable, gone)
        assert running[left].wait(LIMIT_SECONDS) != 0, (
            "the time-out of the script is 6 seconds, torch's own half an hour"
        )
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    assert f"RankError: {message}" in output[left].read_text()
