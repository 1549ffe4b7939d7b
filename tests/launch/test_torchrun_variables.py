"""Pods in which torchrun's own variables give the number of ranks to start."""

from __future__ import annotations

from typing import Any

import pytest

from fabricate.cli.launch import prepared
from fabricate.errors import ConfigurationError, RankError
from fabricate.launch.ranks import detect

POD = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}
OPTIONS = ("config", "nproc", "nnodes", "node_rank", "master_addr", "master_port", "shutdown_timeout", "max_restarts")


def started(monkeypatch: pytest.MonkeyPatch, pod: dict[str, str], **options: Any) -> list[str]:
    """The command line that `fabricate run` becomes in such a pod."""
    for name, value in pod.items():
        monkeypatch.setenv(name, value)
    arguments: dict[str, Any] = {**dict.fromkeys((*OPTIONS, "numa_binding", "strategy", "precision")), **options}
    return prepared(script=__file__, arguments=[], plugins=[], **arguments)[0][3:]


def test_fabricate_run_starts_the_ranks_that_a_pod_asks_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    meeting = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "job-node-0-0.job", "--master-port", "29400"]
    count = ["--nproc-per-node", "4", "--module", "--", "fabricate.cli.rank", __file__]
    assert started(monkeypatch, POD) == [*meeting, *count]
    assert (
        "note: the number of ranks and their address come from environment variables: PET_MASTER_ADDR="
        in capsys.readouterr().err
    )
    assert started(monkeypatch, POD, nproc=4) == [*meeting, *count]


def test_a_pod_for_one_process_starts_it_without_torchrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "0"}
    assert started(monkeypatch, one) == ["--alone", "--", __file__]
    assert capsys.readouterr().err == ""
    assert detect(one).world_size == 1


def test_devices_are_counted_by_torchrun_where_the_pod_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert started(monkeypatch, {"PET_NPROC_PER_NODE": "gpu"})[:3] == ["--standalone", "--nproc-per-node", "gpu"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nproc": 2}, "--nproc 2 and PET_NPROC_PER_NODE=4 contradict each other. Set only one of them"),
        ({"nnodes": 3}, "--nnodes 3 and PET_NNODES=2 contradict each other"),
        ({"node_rank": 0}, "--node-rank 0 and PET_NODE_RANK=1 contradict each other"),
        ({"master_addr": "other"}, "--master-addr other and PET_MASTER_ADDR=job-node-0-0.job contradict each other"),
    ],
)
def test_an_option_that_differs_from_the_pod_is_an_error(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        started(monkeypatch, POD, **options)


def test_a_number_of_nodes_that_changes_is_left_to_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"PET_NNODES='1:4' is not a whole number.*with torchrun"):
        started(monkeypatch, POD | {"PET_NNODES": "1:4"})
    assert started(monkeypatch, POD | {"PET_NNODES": "2:2"})[:2] == ["--nnodes", "2"]


@pytest.mark.parametrize("environ", [POD, {"PET_NNODES": "2"}, {"PET_NPROC_PER_NODE": "2"}, {"PET_NNODES": "1:4"}])
def test_a_script_without_a_launcher_does_not_train_alone_in_each_pod(environ: dict[str, str]) -> None:
    with pytest.raises(RankError, match=r"asks for several ranks \(PET_N.*each pod would train alone") as caught:
        detect(environ)
    assert "`fabricate run script.py`" in str(caught.value)
    rank = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert detect(environ | rank).world_size == 2
