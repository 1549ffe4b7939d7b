"""The planned memory per rank: what is counted, how strategies divide it, what a rank has, and the choice of auto."""

from __future__ import annotations

import re
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.utils.data import TensorDataset

from fabricate import ConfigurationError, Strategy, Trainer, TrainModule
from fabricate.model.host_memory import host_memory
from fabricate.model.memory import available, capacity, need, outline

PAGE = Path(__file__).parents[2] / "docs" / "memory.md"


class Net(TrainModule):
    def __init__(self, width: int = 10, optimizer: Any = torch.optim.AdamW, **options: Any) -> None:
        super().__init__()
        self.width, self.optimizer, self.options = width, optimizer, options
        self.first = torch.nn.Linear(4, 4)
        self.first.requires_grad_(False)
        self.names: list[str] = []
        self.layers = torch.nn.ModuleList()

    def configure_model(self) -> None:
        self.names.append("layers")
        self.layers.append(torch.nn.Linear(self.width, self.width, bias=False))
        self.last = torch.nn.Linear(self.width, 1, bias=False)
        self.last.weight.data.normal_()

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.last(self.layers[0](self.first(batch[0]))).square().mean()

    def configure_optimizers(self) -> Any:
        return self.optimizer((p for p in self.parameters() if p.requires_grad), lr=0.1, **self.options)


def rows() -> TensorDataset:
    return TensorDataset(torch.zeros(8, 4))


def ranks(monkeypatch: pytest.MonkeyPatch, world_size: int) -> None:
    """As a launcher would tell it; a plan starts nothing."""
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "MASTER_PORT": 1}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")


TRAINABLE, FROZEN = 110, 20


@pytest.mark.parametrize(
    ("optimizer", "options", "per_parameter"),
    [
        (torch.optim.AdamW, {}, 8),
        (torch.optim.AdamW, {"amsgrad": True}, 12),
        (torch.optim.AdamW, {"fused": True}, 8),
        (torch.optim.SGD, {}, 0),
        (torch.optim.SGD, {"momentum": 0.9}, 4),
        (torch.optim.RMSprop, {"centered": True}, 8),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_optimizer_state_is_what_a_step_leaves(optimizer: Any, options: dict[str, Any], per_parameter: int) -> None:
    memory = Trainer(max_steps=1).plan(Net(optimizer=optimizer, **options), rows(), batch_size=2)["memory_per_rank"]
    assert memory["parameters"] == 4 * (TRAINABLE + FROZEN)
    assert memory["gradients"] == 4 * TRAINABLE
    assert 0 <= memory["optimizer state"] - per_parameter * TRAINABLE <= 2 * 4, "and a counter per parameter"
    assert memory["total"] == sum(count for kind, count in memory.items() if kind != "total")


def test_the_copies_that_autocast_makes_of_weights_are_counted() -> None:
    plans = {name: Trainer(max_steps=1, precision=name).plan(Net(), rows(), batch_size=2) for name in ("fp32", "bf16")}
    memory, plain = (plans[name]["memory_per_rank"] for name in ("bf16", "fp32"))
    assert memory == plain | {"half-precision copies": 2 * (16 + 110), "total": plain["total"] + 2 * (16 + 110)}


class Stubborn(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise ValueError("only on a GPU")


class Asking(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.trainer.accelerator.num_processes)


class Scheduled(Net):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=self.trainer.total_steps)


def test_optimizer_state_that_cannot_be_measured_is_assumed_and_the_plan_says_why() -> None:
    for module, reason in ((Net(optimizer=Stubborn), "only on a GPU"), (Asking(), "has no attribute 'accelerator'")):
        plan = Trainer(max_steps=1).plan(module, rows(), batch_size=2)
        assert plan["memory_per_rank"]["optimizer state"] == 8 * TRAINABLE
        assert "8 bytes of state per parameter assumed, as for Adam, because: " in plan.source("memory_per_rank")
        assert reason in plan.source("memory_per_rank")
    plan = Trainer(max_steps=1).plan(Scheduled(), rows(), batch_size=2)
    assert "estimate, state of AdamW, activations not counted" in plan.source("memory_per_rank")
    assert plan["learning_rate"] == pytest.approx([0.004])


def test_a_module_is_measured_without_being_built_or_changed() -> None:
    module = Net()
    before, generators = {n: p.clone() for n, p in module.named_parameters()}, torch.get_rng_state()
    plan = Trainer(max_steps=1).plan(module, rows(), batch_size=2)
    assert plan["parameters_trainable"] == TRAINABLE
    assert torch.equal(torch.get_rng_state(), generators)
    assert (module.names, len(module.layers), hasattr(module, "last"), module._trainer) == ([], 0, False, None)
    assert dict(module.named_parameters()).keys() == before.keys()
    assert all(torch.equal(p, before[n]) for n, p in module.named_parameters())
    Trainer(max_steps=1, progress=False).fit(Fitting(), TensorDataset(torch.zeros(8, 10)), batch_size=2)


class Fitting(Net):
    def training_step(self, batch: Any) -> torch.Tensor:
        return self.last(self.layers[0](batch[0])).square().mean()


def test_an_outline_keeps_what_is_shared_and_frozen() -> None:
    module = Net()
    module.again = module.first
    copy = outline(module)
    assert copy.again is copy.first
    assert [p.is_meta for p in copy.parameters()] == [True] * 4
    assert [n for n, p in copy.named_parameters() if not p.requires_grad] == ["first.weight", "first.bias"]


class Reading(Net):
    def configure_model(self) -> None:
        super().configure_model()
        self.scale = float(self.last.weight.sum())


def test_a_module_that_needs_real_tensors_is_not_known_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Trainer(max_steps=1).plan(Reading(), rows(), batch_size=2)
    assert any(note.startswith("memory is not known before building: configure_model needs") for note in plan.notes)
    ranks(monkeypatch, 2)
    plan = Trainer(max_steps=1).plan(Reading(), rows(), batch_size=2)
    assert plan["strategy"] == "ddp"
    assert "memory is not known before building" in plan.source("strategy")


# ------------------------------------------------------------------------------------------------- auto


def test_auto_divides_what_does_not_fit_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks(monkeypatch, 4)
    room, where = host_memory(4)
    assert where.endswith("shared by 4 ranks") or "ulimit" in where
    too_wide = int((room / 4) ** 0.5) + 1000  # parameters alone take more than a rank has
    for width, strategy, words in ((too_wide, "fsdp", "more than"), (10, "ddp", "of")):
        plan = Trainer(max_steps=1).plan(Net(width=width), rows(), batch_size=2)
        assert plan["strategy"] == strategy
        assert re.search(rf"^auto: 4 processes; a replica takes [\d.]+ [KMGT]?i?B,? {words} ", plan.source("strategy"))
        assert plan["memory_by_strategy"].keys() == {"ddp", "fsdp"}
        why = re.search(r"\(cpu\), fsdp \(a replica takes .*, more than .* \(.*\)\), fp32", plan.summary())
        assert bool(why) == (strategy == "fsdp"), plan.summary()
    assert plan.source("memory_by_strategy").startswith("all within")
    plan = Trainer(max_steps=1, strategy="ddp").plan(Net(width=too_wide), rows(), batch_size=2)
    assert (plan["strategy"], plan.source("strategy")) == ("ddp", "argument")
    assert "ddp" in plan.source("memory_by_strategy")
    assert "not within" in plan.source("memory_by_strategy")


def test_a_plan_of_a_script_allocates_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FABRICATE_PLAN_ONLY", "1")
    room, _ = host_memory()
    with pytest.raises(SystemExit) as ended:
        Trainer(max_steps=1).fit(Net(width=int(room**0.5)), rows(), batch_size=2)
    assert ended.value.code == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  memory per rank"))
    assert re.search(r"total [\d.]+ TiB|total [\d.]+ GiB", line)


# ------------------------------------------------------------------------------------------------- the tutorials' table


class Divided(Strategy):
    def __init__(self, *kinds: str) -> None:
        self.kinds = kinds

    @property
    def divides(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.kinds


def test_the_table_of_seven_billion_parameters_comes_out_of_the_same_rule() -> None:
    number, world_size = 7_000_000_000, 4
    half = {"parameters": 2 * number, "gradients": 2 * number, "optimizer state": 8 * number}
    countings: tuple[Mapping[str, int], ...] = (half, {**half, "master weights": 4 * number})
    kinds = (
        (),
        ("optimizer state", "master weights"),
        ("optimizer state", "master weights", "gradients"),
        ("optimizer state", "master weights", "gradients", "parameters"),
    )
    empty = torch.nn.Linear(1, 1, device="meta")
    table = [
        [sum(Divided(*each).memory_per_rank(empty, whole, world_size).values()) / 1e9 for whole in countings]
        for each in kinds
    ]
    assert table == [[84, 112], [42, 49], [31.5, 38.5], [21, 28]]
    shown = re.findall(r"^\| (?:replicas|ZeRO).*? \| ([\d.]+) \| ([\d.]+) \|$", PAGE.read_text(), re.MULTILINE)
    assert [[float(each) for each in row] for row in shown] == table
    header = next(line for line in PAGE.read_text().splitlines() if line.startswith("| | as tutorials"))
    assert "no master weights" in header
    assert "with float32 master weights" in header


# ------------------------------------------------------------------------------------------------- what a rank has


def machine(root: Path, cgroup: str, limits: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    for file, text in limits.items():
        (root / "sys/fs/cgroup" / file).parent.mkdir(parents=True, exist_ok=True)
        (root / "sys/fs/cgroup" / file).write_text(text)
    return root


GIB = 2**30


@pytest.mark.parametrize(
    ("cgroup", "limits", "ranks", "wanted"),
    [
        (
            "0::/jobs/7\n",
            {"jobs/7/memory.max": "max\n", "jobs/memory.max": f"{GIB}\n"},
            1,
            (GIB, "the limit of control group /jobs"),
        ),
        (
            "0::/jobs/7\n",
            {"jobs/7/memory.max": f"{GIB}\n"},
            2,
            (GIB // 2, "the limit of control group /jobs/7, shared by 2 ranks"),
        ),
        ("0::/\n", {"memory.max": f"{GIB}\n"}, 1, (GIB, "the limit of the control group")),
        (
            "5:cpu:/a\n4:memory:/b\n",
            {"memory/b/memory.limit_in_bytes": f"{GIB}\n", "memory/memory.limit_in_bytes": "9223372036854771712\n"},
            4,
            (GIB // 4, "the limit of control group /b, shared by 4 ranks"),
        ),
    ],
    ids=["above", "shared", "root", "version 1"],
)
def test_every_limit_of_the_control_groups_counts(
    tmp_path: Path, cgroup: str, limits: dict[str, str], ranks: int, wanted: tuple[int, str]
) -> None:
    assert host_memory(ranks, machine(tmp_path, cgroup, limits)) == wanted


def test_the_host_itself_is_a_limit(tmp_path: Path) -> None:
    whole, where = host_memory(1, tmp_path)
    assert where == "the host's memory"
    assert host_memory(2, tmp_path)[0] == whole // 2


def test_a_limit_per_process_is_not_shared(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    low = 4 * GIB  # above what this process has already
    resource.setrlimit(resource.RLIMIT_DATA, (low, hard))
    try:
        assert host_memory(1, tmp_path) == (low, "ulimit -d")
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def test_an_unknown_unit_is_told_by_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks(monkeypatch, 2)
    with pytest.raises(ConfigurationError, match="the module has no Missing"):
        Trainer(max_steps=1, strategy="fsdp:wrap=Missing").plan(Net(), rows(), batch_size=2)


def test_memory_of_an_evaluation_is_parameters_only() -> None:
    module = Net()
    module.configure_model()
    assert need(module, None).whole == {"parameters": 4 * (TRAINABLE + FROZEN)}


class Named(Strategy):
    divides: ClassVar[tuple[str, ...]] = ("gradients",)


def test_a_strategy_divides_the_kinds_that_it_names() -> None:
    memory = Named().memory_per_rank(torch.nn.Linear(1, 1), {"parameters": 10, "gradients": 10}, 4)
    assert memory == {"parameters": 10, "gradients": 3}


def test_a_plan_counts_what_is_free_on_a_device_and_ranks_choose_by_what_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = torch.device("cuda", 1)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda index: (50, 80))
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda index: 20)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "some GPU")
    assert available(device, 1) == (70, "free on some GPU"), "what this process holds already is its own to use"
    assert capacity(device, 1) == (80, "some GPU"), "the same on every rank, whatever else runs beside it"
