"""DeepSpeed's JSON files: adopted values, filled values, refused keys, and the names in a conflict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from fabricate import ConfigurationError, Plan, Trainer, TrainModule
from fabricate.testing import run_ranks

FILES = Path(__file__).parents[2] / "examples" / "configs"
ROWS = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))


class Line(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.01)


def _launch(monkeypatch: pytest.MonkeyPatch, world_size: int) -> None:
    """As on rank 0, so that a plan can be made; nothing is opened for it."""
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    for name, value in (variables | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}).items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks."""
    _launch(monkeypatch, 2)


def _plan(strategy: Any, data: Any = ROWS, batch_size: int | None = 3, **arguments: Any) -> Plan:
    trainer = Trainer(strategy=strategy, max_steps=2, progress=False, **arguments)
    return trainer.plan(Line(), data, batch_size=batch_size)


def _setting(plan: Plan, name: str) -> tuple[Any, str]:
    entry = next(setting for setting in plan.settings if setting.name == name)
    return entry.value, entry.source


@pytest.mark.usefixtures("launched")
def test_what_a_file_sets_is_adopted_and_every_auto_is_filled() -> None:
    for stage, power in (("zero2", "fp16.initial_scale_power=16"), ("zero3", "fp16.loss_scale_window=2000")):
        file = FILES / f"deepspeed_{stage}.json"
        plan = _plan(f"{stage}:config={file}", gradient_accumulation_steps=2)
        assert _setting(plan, "precision") == ("fp16", f"fp16.enabled in {file}")
        assert _setting(plan, "clipping")[1].startswith(f"by DeepSpeed, once per update; gradient_clipping in {file}")
        filled, _ = _setting(plan, "configuration")
        for text in (power, "gradient_accumulation_steps=2", "train_micro_batch_size_per_gpu=3", "train_batch_size=12"):
            assert text in filled
        window = 1000 if stage == "zero2" else 2000
        assert _setting(plan, "loss scaling")[0].startswith(f"dynamic from 65536, grows after {window} updates")
    assert "exports are gathered anyway" in _setting(plan, "without effect")[0]


@pytest.mark.usefixtures("launched")
def test_batch_sizes_of_a_file_are_adopted() -> None:
    content = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": "auto"}
    plan = _plan(_strategy(content), batch_size=None)
    assert _setting(plan, "micro_batch_size")[0] == 4
    assert _setting(plan, "gradient_accumulation_steps") == (3, "from train_batch_size in config")
    assert _setting(plan, "global_batch_size")[0] == 24


def _strategy(content: dict[str, Any], stage: int = 2, **options: Any) -> Any:
    from fabricate_deepspeed.stage3 import ZeRO3
    from fabricate_deepspeed.stage12 import ZeRO1, ZeRO2

    return {1: ZeRO1, 2: ZeRO2, 3: ZeRO3}[stage](config=content, **options)


CONFLICTS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"gradient_clipping": 1.0}, {"max_grad_norm": 0.5}, "0.5 is set in the Trainer and 1.0 by gradient_clipping in config"),
    ({"gradient_clipping": 0.0}, {"max_grad_norm": 0.5}, "gradient_clipping is 0.0, but max_grad_norm=0.5 means 0.5"),
    ({"gradient_accumulation_steps": 4}, {"gradient_accumulation_steps": 2}, "and 4 by gradient_accumulation_steps in config"),
    ({"train_batch_size": 64}, {"global_batch_size": 12}, "12 is set in the Trainer and 64 by train_batch_size in config"),
    ({"train_batch_size": 12}, {"gradient_accumulation_steps": 4}, "means gradient_accumulation_steps=2, but 4 is set (argument)"),
    ({"train_batch_size": 10}, {}, "global_batch_size=10 (train_batch_size in config) is not a multiple of batch_size (3) x ranks (2) = 6"),
    ({"train_micro_batch_size_per_gpu": 8}, {}, "batches of 3 rows per rank, but train_micro_batch_size_per_gpu in config sets 8"),
    ({"fp16": {"enabled": True}}, {"precision": "bf16"}, "precision='bf16' is set in the Trainer and 'fp16' by fp16.enabled in config"),
    ({"bf16": {"enabled": False}}, {"precision": "bf16"}, "bf16.enabled is False, but precision='bf16' means True"),
    ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, {}, "fp16.enabled and bf16.enabled are both true"),
    ({"fp16": {"enabled": True, "loss_scale_window": 9}}, {"precision": "fp16:growth_interval=50"}, "window is 9, but the options"),
    ({"zero_optimization": {"stage": 3}}, {}, "zero_optimization.stage is 3, but strategy='zero2' means 2"),
    ({"gradient_clippping": 1.0}, {}, "'gradient_clippping' is not a key of a DeepSpeed configuration; did you mean 'gradient_clipping'?"),
    ({"gradient_clipping": "much"}, {}, "gradient_clipping='much' is not a positive number; correct it, or write 'auto'"),
    ({"amp": {"enabled": True}}, {}, "amp is refused: use precision="),
    ({"activation_checkpointing": {"partition_activations": True}}, {}, "by itself it configures nothing"),
    ({"gradient_allreduce_op": "sum"}, {}, "gradient_allreduce_op is refused"),
    ({"zero_optimization": {"cpu_offload": True}}, {}, "write offload_optimizer: {device: cpu}"),
    ({"zero_optimization": {"compute_grad_norm": False}}, {}, "compute_grad_norm is refused"),
    ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, {}, "device is 'nvme'; offload to NVMe is supported"),
]  # fmt: skip


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize(("content", "arguments", "message"), CONFLICTS)
def test_two_set_values_that_differ_and_what_means_nothing_are_refused(
    content: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        _plan(_strategy(content), **arguments)
    assert message in str(caught.value)


@pytest.mark.usefixtures("launched")
def test_equal_values_on_both_sides_and_switched_off_sections_pass() -> None:
    content = {
        "gradient_clipping": 1.0,
        "fp16": {"enabled": False},
        "bf16": {"enabled": "auto"},
        "amp": {"enabled": False},
        "steps_per_print": 100,
        "zero_optimization": {"stage": "auto", "offload_optimizer": {"device": "cpu"}},
    }
    plan = _plan(_strategy(content, offload_optimizer="cpu"), max_grad_norm=1.0, precision="bf16")
    assert _setting(plan, "precision") == ("bf16", "argument")
    assert _setting(plan, "offload")[0] == "offload_optimizer cpu"
    assert "log_every= sets when metrics are logged" in _setting(plan, "without effect")[0]
    assert _setting(_plan(_strategy({}), data=DataLoader(ROWS, 3), batch_size=None), "micro_batch_size")[0] == 3


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("zero0", "stage 0 shards nothing, it is data parallelism; use strategy='ddp'"),
        ("zero3:config=nowhere.json", "config='nowhere.json' cannot be read"),
        ("zero2:offload_optimizer=disk", "offload_optimizer='disk': give 'cpu'"),
        (
            "zero3:offload_param=nvme",
            "offload_param='nvme': give 'cpu' or leave it out; offload to NVMe is supported for the optimizer of stage 3",
        ),
        ("zero3:offload_optimizer=nvme", "offload to files needs both, offload_optimizer=nvme and nvme_path=FOLDER"),
        ("zero3:nvme_path=disk", "offload to files needs both, offload_optimizer=nvme and nvme_path=FOLDER"),
        ("zero2:offload_optimizer=nvme", "offload to NVMe is supported for the optimizer of stage 3"),
        ("zero2:offload_param=cpu", "has no option 'offload_param'"),
    ],
)
def test_wrong_names_and_options_are_refused(strategy: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        _plan(strategy)
    assert message in str(caught.value)


@pytest.mark.usefixtures("launched")
def test_a_file_that_offloads_to_files_says_where_and_nothing_that_a_checkpoint_could_miss() -> None:
    def error_of(**section: Any) -> str:
        content = {"zero_optimization": {"offload_optimizer": {"device": "nvme", **section}}}
        with pytest.raises(ConfigurationError) as caught:
            _plan(_strategy(content, stage=3))
        return str(caught.value)

    assert "offload_optimizer.device is 'nvme' without nvme_path; give a folder" in error_of()
    assert "offload_optimizer.pipeline_read is refused" in error_of(nvme_path="disk", pipeline_read=True)
    section = {"device": "nvme", "nvme_path": "disk"}
    swapping = _plan(_strategy({"zero_optimization": {"offload_optimizer": section}}, stage=3))
    assert _setting(swapping, "offload")[0] == "offload_optimizer nvme"
    memory, _ = _setting(_plan("zero3:offload_optimizer=nvme,nvme_path=disk"), "memory_per_rank")
    assert (memory["host master weights"], memory["host optimizer state"]) == (0, 0)
    assert memory["host swap buffers"] == 5 * memory["host gradients"], "a group at a time, here of everything"


def test_one_process_is_enough_for_a_file() -> None:
    plan = _plan(f"zero3:config={FILES / 'deepspeed_zero3.json'}")
    assert (plan["world_size"], plan["distributed_type"]) == (1, "DEEPSPEED")
    assert "strategy='zero3' on one process: nothing is divided between ranks" in plan.notes


def _optimizer_sections(sections: list[dict[str, Any]]) -> list[str]:
    outcomes = []
    for section in sections:
        trainer = Trainer(strategy=_strategy(section), max_steps=1, seed=1, precision="fp32", progress=False)
        try:
            trainer.fit(Line(), ROWS, batch_size=3)
            outcomes.append("trained")
        except ConfigurationError as exc:
            outcomes.append(str(exc))
    return outcomes


def test_sections_for_optimizer_and_scheduler_are_compared_with_the_modules_own() -> None:
    auto = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
    sections: list[tuple[dict[str, Any], str]] = [
        ({"optimizer": {"type": "AdamW", "params": auto}}, "trained"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.999]}}}, "trained"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto"}}}, "trained"),
        ({"optimizer": {"type": "SGD"}}, "optimizer.type is 'SGD', but configure_optimizers returns AdamW; remove"),
        ({"optimizer": {"type": "Adam", "params": {"lr": 1.0}}}, "optimizer.params.lr is 1.0, but AdamW of configure_optimizers has 0.01"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}}, "the scheduler comes from the module"),
        ({"communication_data_type": "auto"}, "'auto' has no meaning for communication_data_type"),
        ({"zero_optimization": {"stage3_max_live": 5}}, "DeepSpeed refuses config: 1 validation error"),
    ]  # fmt: skip
    outcomes = run_ranks(_optimizer_sections, 2, [section for section, _ in sections])[0]
    for outcome, (_, wanted) in zip(outcomes, sections, strict=True):
        assert wanted in outcome


def _tutorials(root: Path) -> None:
    for stage in ("zero2", "zero3"):
        torch.manual_seed(0)
        trainer = Trainer(
            strategy=f"{stage}:config={FILES / f'deepspeed_{stage}.json'}",
            max_steps=4,
            seed=1,
            run_dir=root / stage,
            progress=False,
        )
        trainer.fit(Line(), ROWS, batch_size=3)


def test_the_files_of_the_tutorials_train_as_they_are(tmp_path: Path) -> None:
    run_ranks(_tutorials, 2, tmp_path, timeout=100)
    for stage in ("zero2", "zero3"):
        plan = json.loads((tmp_path / stage / "plan.json").read_text())["settings"]
        assert plan["precision"]["value"] == "fp16"
        assert plan["clipping"]["value"] == "to the norm 1"
        assert (tmp_path / stage / "model" / "model.safetensors").exists()


class Billions(TrainModule):
    """7 billion parameters, described and never built."""

    def configure_model(self) -> None:
        self.layers = torch.nn.ModuleList(torch.nn.Linear(50_000, 20_000, bias=False) for _ in range(7))

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layers[0](batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def test_the_memory_of_each_stage_is_what_it_divides(monkeypatch: pytest.MonkeyPatch) -> None:
    """7 billion parameters in half precision on 4 ranks, float32 masters counted: 49, 38.5 and 28 GB, next to 112 for replicas."""
    _launch(monkeypatch, 4)
    for stage, gigabytes in (("zero1", 49.0), ("zero2", 38.5), ("zero3", 28.0)):
        trainer = Trainer(strategy=stage, precision="bf16", max_steps=1, progress=False)
        memory, _ = _setting(trainer.plan(Billions(), ROWS, batch_size=3), "memory_per_rank")
        assert (memory["total"] - memory["bucket"]) / 1e9 == pytest.approx(gigabytes)
    offloaded = Trainer(strategy="zero2:offload_optimizer=cpu", precision="bf16", max_steps=1, progress=False)
    memory, _ = _setting(offloaded.plan(Billions(), ROWS, batch_size=3), "memory_per_rank")
    assert (memory["host master weights"] + memory["host optimizer state"]) / 1e9 == pytest.approx(21.0)


def test_fabricate_plan_shows_every_strategy_that_is_installed_as_tutorials_count_and_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seven billion parameters in half precision on 4 ranks. A run, which did not ask for them, looks at no plugins."""
    _launch(monkeypatch, 4)
    trainer = Trainer(strategy="ddp", precision="bf16", max_steps=1, progress=False)
    settings = trainer.plan(Billions(), ROWS, batch_size=3).to_json()["settings"]
    assert settings["memory_by_strategy"]["value"].keys() == {"ddp", "fsdp"}
    assert "memory_in_tutorials" not in settings
    monkeypatch.setenv("FABRICATE_PLAN_ONLY", "1")
    plan = trainer.plan(Billions(), ROWS, batch_size=3)
    in_tutorials, with_masters = ({}, {})
    for table, name in ((in_tutorials, "memory_in_tutorials"), (with_masters, "memory_with_masters")):
        table.update(text.removesuffix(" GB").split() for text in plan[name])
    three = ("zero1", "zero2", "zero3")
    assert [in_tutorials[name] for name in ("ddp", *three, "fsdp")] == ["84.0", "42.0", "31.5", "21.0", "21.0"]
    assert [with_masters[name] for name in ("ddp", *three, "fsdp")] == ["112.0", "49.0", "38.5", "28.0", "28.0"]
    assert "without float32 master weights" in plan.source("memory_in_tutorials")
    takes = plan["memory_by_strategy"]
    assert takes.keys() >= {"ddp", "fsdp", "diloco", *three}, "what is installed, without what refuses: single, zero0"
    assert takes.keys().isdisjoint({"single", "zero0"})
    assert [takes[name] / 1e9 for name in three] == pytest.approx([50, 39.5, 29]), "one bucket besides"
    assert takes["diloco"] / 1e9 == pytest.approx(112 + 56 + 84 + 14), (
        "the outer optimizer, a replica while others meet, and the copies of weights in half precision"
    )
