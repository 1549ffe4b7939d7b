"""A model that is larger than its device: layers on disk compute the same as in memory, and unsupported uses are refused by name."""

from __future__ import annotations

import gc
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload

from fabricate import ConfigurationError, Trainer, TrainModule
from fabricate.checkpoint.format.directory import Reader
from fabricate.strategies.device_map import DeviceMap

ROWS = torch.randint(0, 32, (8, 6), generator=torch.Generator().manual_seed(0))


class Net(TrainModule):
    """Tied weights, torch's attention, which computes with the weights of its layers, a buffer, and a parameter beside the layers."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.frozen = frozen
        self.losses: list[float] = []

    def configure_model(self) -> None:
        self.embed = torch.nn.Embedding(32, 64)
        kind = torch.nn.TransformerEncoderLayer
        self.blocks = torch.nn.ModuleList(kind(64, 2, 64, dropout=0.1, batch_first=True) for _ in range(3))
        self.attention = torch.nn.MultiheadAttention(64, 2, batch_first=True)
        self.norm = torch.nn.BatchNorm1d(6)
        self.head = torch.nn.Linear(64, 32, bias=False)
        self.head.weight = self.embed.weight
        self.scale = torch.nn.Parameter(torch.ones(1))
        if self.frozen:
            self.requires_grad_(False)
            self.adapter = torch.nn.Linear(64, 64)
            self.scale.requires_grad_(True)
            self.norm.requires_grad_(True)

    def init_weights(self, submodule: Any) -> None:
        if isinstance(submodule, Net):
            torch.nn.init.constant_(submodule.scale, 0.05)
        elif isinstance(submodule, torch.nn.MultiheadAttention):
            submodule._reset_parameters()
        else:
            submodule.reset_parameters()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        x = x + self.attention(x, x, x)[0]
        x = x + self.adapter(x) if self.frozen else x
        scores: torch.Tensor = self.head(self.norm(x)) * self.scale
        return scores

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self(batch).flatten(0, 1), batch.roll(1, 1).flatten())

    def validation_step(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.training_step(batch)}

    def predict_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)

    def on_step(self, loss: torch.Tensor) -> None:
        self.losses.append(float(loss))


def trainer(strategy: str, **settings: Any) -> Trainer:
    return Trainer(**{"strategy": strategy, "precision": "fp32", "seed": 1, "progress": False, **settings})


def mapped(folder: Path, size: str = "150KB") -> str:
    return f"device_map:max_memory=cpu:{size},offload_folder={folder / 'weights'}"


def evaluated(module: Net, strategy: str, **settings: Any) -> tuple[dict[str, float], torch.Tensor]:
    own = trainer(strategy, **settings)
    return own.validate(module, ROWS, batch_size=4), torch.stack(list(own.predict(module, ROWS, batch_size=4)))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_validated_and_predicted_is_what_one_device_computes(
    precision: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics, scores = evaluated(Net(), "single", precision=precision)
    module = Net()
    mapped_metrics, others = evaluated(module, mapped(tmp_path), precision=precision)
    assert mapped_metrics == metrics
    assert torch.equal(scores, others)
    assert re.search(r"device map: cpu [\d.]+ KB, disk [\d.]+ KB \(max_memory=cpu:150KB\)", capsys.readouterr().out)
    assert sum(p.is_meta for p in module.parameters()) > 20
    assert not module.scale.is_meta
    assert module.head.weight is module.embed.weight
    (folder,) = (tmp_path / "weights").iterdir()
    del module
    gc.collect()
    assert not folder.exists()


def fit(strategy: str, steps: int = 4, module: Net | None = None, **settings: Any) -> Net:
    module = module or Net(frozen=True)
    trainer(strategy, max_steps=steps, **settings).fit(module, ROWS, ROWS[:4], batch_size=2, shuffle=False)
    return module


def test_what_is_trained_beside_layers_on_disk_is_trained_as_on_one_device_and_resumes_exactly(tmp_path: Path) -> None:
    alone = fit("single", save_frozen=False, run_dir=tmp_path / "single")
    straight = fit(mapped(tmp_path), run_dir=tmp_path / "straight")
    first = fit(mapped(tmp_path), steps=2, run_dir=tmp_path / "halves")
    second = fit(mapped(tmp_path), run_dir=tmp_path / "halves")
    assert straight.losses == alone.losses == first.losses + second.losses
    trained = [name for name, p in alone.named_parameters() if p.requires_grad]
    for module in (straight, second):
        assert all(torch.equal(module.get_parameter(name), alone.get_parameter(name)) for name in trained)
        assert module.blocks[0].linear1.weight.is_meta
    with Reader(tmp_path / "halves" / "checkpoints" / "step-00000004") as reader:
        saved = {name.removeprefix("model/") for name in reader.manifest.tensors if name.startswith("model/")}
    assert {name for name in saved if not name.startswith("norm.")} == {n for n in trained if not n.startswith("norm.")}
    whole = [(tmp_path / run / "model" / "model.safetensors").read_bytes() for run in ("single", "straight", "halves")]
    assert whole[0] == whole[1] == whole[2]


def test_recomputed_blocks_are_loaded_again_in_backward(tmp_path: Path) -> None:
    assert fit(mapped(tmp_path), activation_checkpointing=True).losses == fit("single").losses


def test_a_checkpoint_of_another_strategy_is_loaded_where_the_weights_lie(tmp_path: Path) -> None:
    trained = fit("single", module=Net(), run_dir=tmp_path / "run")
    step = tmp_path / "run" / "checkpoints" / "step-00000004"
    own = trainer("single").validate(trained, ROWS, batch_size=4)
    module = Net()
    assert trainer(mapped(tmp_path)).validate(module, ROWS, batch_size=4, checkpoint=step) == own
    assert module.blocks[0].linear1.weight.is_meta
    again = trainer(mapped(tmp_path)).validate(module, ROWS, batch_size=4)  # another Trainer, the same module
    assert again == own


def test_where_all_fits_the_module_is_whole_afterwards(tmp_path: Path) -> None:
    module = Net()
    evaluation = evaluated(module, "device_map")
    assert not any(p.is_meta for p in module.parameters())
    assert evaluation[0] == evaluated(module, "single")[0]
    assert fit("device_map", module=Net()).losses == fit("single", module=Net()).losses


def test_the_plan_has_the_device_map_and_counts_what_is_on_the_device(tmp_path: Path) -> None:
    module = Net(frozen=True)
    own = trainer(mapped(tmp_path), max_steps=1, run_dir=tmp_path / "run", print_plan="none")
    own.fit(module, ROWS, batch_size=2)
    plan = {
        name: line["value"]
        for name, line in json.loads((tmp_path / "run" / "plan.json").read_text())["settings"].items()
    }
    assert "disk" in plan["device map"]
    resident = sum(p.nbytes for p in module.parameters() if not p.is_meta)
    assert plan["memory_per_rank"]["parameters"] == resident
    assert resident < sum(p.nbytes for p in module.parameters()) / 2


def test_a_fit_of_weights_that_are_not_on_the_device_is_refused_before_its_first_step(tmp_path: Path) -> None:
    module = Net()
    with pytest.raises(
        ConfigurationError, match=r"strategy='device_map': the trainable parameters .* are not on the device"
    ):
        fit(mapped(tmp_path), module=module)
    assert module.losses == []


def test_a_step_that_writes_into_a_layer_that_is_loaded_for_it_is_refused(tmp_path: Path) -> None:
    class Writing(Net):
        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.blocks[2].linear1.weight.mul_(0.9)
            return super().training_step(batch)

    with pytest.raises(ConfigurationError, match=r"blocks\.2\.linear1\.weight"):
        fit(mapped(tmp_path), module=Writing(frozen=True))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ("max_memory=cpu:150KB", r"of the weights go to the disk; name a folder, 'device_map:offload_folder=DIR'"),
        (
            "max_memory=cpu:1KB,offload_folder=x",
            r"max_memory gives 1.0 KB to cpu, but blocks\.0 alone takes [\d.]+ KB while it runs",
        ),
        ("max_memory=150KB", r"max_memory='150KB': '150KB' is not a device and a size; write 0:20GB\+cpu:60GB"),
        ("max_memory=cpu:many", r"'cpu:many' is not a device and a size"),
        ("max_memory=0:1GB", r"max_memory='0:1GB' does not name cpu, on which this process computes"),
        (
            "max_memory=cpu:150KB,offload_folder=/dev/null/x",
            r"offload_folder='/dev/null/x': .*; name a folder that this process can write",
        ),
    ],
)
def test_what_cannot_be_placed_is_an_error_that_names_the_option(options: str, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        evaluated(Net(), f"device_map:{options}")


def test_a_disk_without_room_is_an_error_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(
        ConfigurationError, match=r"offload_folder=.* has 1 B free, but [\d.]+ KB of weights would be written there"
    ):
        evaluated(Net(), mapped(tmp_path))


def test_several_ranks_are_refused_with_what_to_use_instead() -> None:
    (reason,) = DeviceMap().check(2, torch.device("cpu"))
    assert "the devices of one process, but 2 processes were started" in reason
    assert "strategy='fsdp:offload=cpu'" in reason


class Offloaded(Net):
    """A model that its author offloaded with Accelerate."""

    def __init__(self, folder: Path | None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.Sequential(torch.nn.Embedding(32, 64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 32))
        if folder is not None:
            disk_offload(self.layers, folder, execution_device=torch.device("cpu"))
        else:
            cpu_offload(self.layers, execution_device=torch.device("cpu"))

    configure_model = TrainModule.configure_model

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layers(batch)
        return scores


@pytest.mark.parametrize("on_disk", [True, False])
def test_a_model_that_was_offloaded_before_stays_so_and_other_strategies_refuse_it(
    on_disk: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "own" if on_disk else None
    module = Offloaded(folder)
    whole = torch.nn.Sequential(torch.nn.Embedding(32, 64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 32))
    torch.manual_seed(3)
    for layer in whole:
        layer.reset_parameters()
    (_, scores) = evaluated(module, "device_map")
    assert torch.equal(scores, torch.stack([whole(row) for row in ROWS.split(4)]).flatten(0, 1).detach())
    with pytest.raises(
        ConfigurationError, match=r"strategy='single' needs all weights on a device, but a device_map placed"
    ):
        evaluated(Offloaded(tmp_path / "other" if on_disk else None), "single")
