"""Checkpoints for and from other tools: each format is read or written by its own tool."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from torch.utils.data import TensorDataset

import fabricate
from fabricate import CheckpointError, ConfigurationError, Trainer, TrainModule
from fabricate.checkpoint.format.directory import (
    Chunk,
    Manifest,
    Reader,
    commit,
    stage,
    tensors_of,
    write_json,
    write_tensors,
)
from fabricate.cli.main import main

STEPS = 4
SAVED = f"checkpoints/step-{STEPS:08d}"


class Net(TrainModule):
    """Running statistics, tied weights, a frozen parameter, a buffer outside the state dict, two groups, a schedule."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, width)
        self.norm = torch.nn.BatchNorm1d(width)
        self.last = torch.nn.Linear(width, 4)
        self.tied = torch.nn.Linear(4, width)
        self.tied.weight = self.first.weight
        self.frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("scale", torch.full((4,), 2.0), persistent=False)

    def training_step(self, batch: Any) -> torch.Tensor:
        (x,) = batch
        y = self.last(self.norm(torch.tanh(self.first(x)))) + self.tied(x).mean()
        return torch.nn.functional.mse_loss(y, x * self.scale)

    def validation_step(self, batch: Any) -> dict[str, torch.Tensor]:
        return {"val_loss": self.training_step(batch)}

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim > 1]},
            {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)


def data() -> TensorDataset:
    torch.manual_seed(3)
    return TensorDataset(torch.randn(16, 4))


def fit(run_dir: Path, module: TrainModule, data: Any, **options: Any) -> TrainModule:
    trainer = Trainer(max_steps=STEPS, seed=1, run_dir=run_dir, progress=False, log_every=1, **options)
    trainer.fit(module, data, batch_size=4)
    return module


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A run directory and the state dict of the module that was trained there."""
    root = tmp_path_factory.mktemp("run")
    return root, fit(root, Net(), data()).state_dict()


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["ckpt", *map(str, arguments)])


def same(weights: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return weights.keys() == wanted.keys() and all(
        torch.equal(weights[name], wanted[name]) and weights[name].dtype == wanted[name].dtype for name in wanted
    )


# -- out


def test_safetensors_hold_the_state_dict_with_shared_tensors_once(run: Any, tmp_path: Path) -> None:
    root, wanted = run
    shown = invoke("export", root, tmp_path / "weights")
    assert (shown.exit_code, shown.stdout) == (0, f"wrote {tmp_path / 'weights'}\n")
    assert "shared tensors: tied.weight is stored once, as first.weight" in shown.stderr
    assert same(load_file(tmp_path / "weights"), {n: t for n, t in wanted.items() if n != "tied.weight"})
    assert same(load_file(tmp_path / "weights"), load_file(root / "model/model.safetensors"))


def test_a_torch_file_is_a_state_dict_that_loads_without_running_code(run: Any, tmp_path: Path) -> None:
    root, wanted = run
    shown = invoke("export", root / SAVED, tmp_path / "model.pt", "--format", "torch")
    assert "this format is a pickle" in shown.stderr
    weights = torch.load(tmp_path / "model.pt", weights_only=True)
    assert same(weights, dict(wanted))
    assert weights["tied.weight"].data_ptr() == weights["first.weight"].data_ptr()
    assert sorted(os.listdir(tmp_path)) == ["model.pt"]


@pytest.mark.parametrize("name", ["out.pt", "out.pth", "out.bin"])
def test_the_ending_of_a_torch_file_needs_the_format(run: Any, name: str, tmp_path: Path) -> None:
    shown = invoke("export", run[0], tmp_path / name)
    assert shown.exit_code == 2
    assert "is the ending of torch's format" in shown.stderr
    assert "Pass --format torch, which is a pickle, or call it out.safetensors" in " ".join(shown.stderr.split())
    assert os.listdir(tmp_path) == []
    assert invoke("export", run[0], tmp_path / name, "--format", "safetensors").exit_code == 0
    assert same(load_file(tmp_path / name), load_file(run[0] / "model/model.safetensors"))


class Storyteller(TrainModule):
    def configure_model(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=1)
        self.model = GPT2LMHeadModel(config)
        self.extra = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=batch[0], labels=batch[0]).loss + 0 * self.extra(torch.ones(1)).sum()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_transformers_reads_an_exported_checkpoint_and_computes_the_same(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    module = Storyteller()
    stories = TensorDataset(torch.randint(0, 20, (16, 8)))
    fit(tmp_path / "run", module, stories)
    shown = invoke("export", tmp_path / "run", tmp_path / "out", "--format", "transformers")
    assert shown.exit_code == 0
    assert "left out, because they are not part of the transformers model: extra.bias, extra.weight" in shown.stderr
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "generation_config.json", "model.safetensors"]
    tokens = stories.tensors[0]
    with torch.no_grad():
        wanted = module.model.eval()(tokens).logits
        logits = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()(tokens).logits
    assert torch.equal(logits, wanted)
    for name in ("config.json", "generation_config.json"):
        documents = [json.loads((folder / name).read_text()) for folder in (tmp_path / "out", tmp_path / "run/model")]
        assert documents[0] == documents[1]


def test_a_weight_that_the_module_shares_with_its_transformers_model_is_exported(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    class Shared(Storyteller):
        def configure_model(self) -> None:
            super().configure_model()
            model = self.model
            del self.model
            self.words = model.get_input_embeddings()  # its first name in the module
            self.model = model

    torch.manual_seed(1)
    module = Shared()
    stories = TensorDataset(torch.randint(0, 20, (16, 8)))
    fit(tmp_path / "run", module, stories)
    shown = invoke("export", tmp_path / "run", tmp_path / "out", "--format", "transformers")
    assert "not part of the transformers model: extra.bias, extra.weight\n" in shown.stderr
    with torch.no_grad():
        wanted = module.model.eval()(stories.tensors[0]).logits
        logits = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()(stories.tensors[0]).logits
    assert torch.equal(logits, wanted)


def test_a_module_without_a_transformers_model_has_no_such_layout(run: Any, tmp_path: Path) -> None:
    shown = invoke("export", run[0], tmp_path / "out", "--format", "transformers")
    assert shown.exit_code == 2
    assert "Use --format safetensors" in shown.stderr
    assert os.listdir(tmp_path) == []


ACCELERATE = """
import random, sys
sys.path.insert(0, sys.argv[1])
import accelerate, numpy, torch
from test_convert import Net
module = Net()
optimizer, scheduler = module.configure_optimizers()
accelerator = accelerate.Accelerator(cpu=True)
module, optimizer, scheduler = accelerator.prepare(module, optimizer, scheduler)
accelerator.load_state(sys.argv[2])
state = {"module": module.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
state["drawn"] = [random.random(), float(numpy.random.rand()), float(torch.rand(()))]
torch.save(state, sys.argv[3])
accelerator.save_state(sys.argv[4])
accelerator.save_state(sys.argv[4] + "-bin", safe_serialization=False)
"""


@pytest.fixture(scope="module")
def accelerated(run: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a process with Accelerate loaded from an exported folder, as loaded.pt, and saved again, as saved and saved-bin."""
    root = tmp_path_factory.mktemp("accelerate")
    assert invoke("export", run[0], root / "exported", "--format", "accelerate").exit_code == 0
    (root / "script.py").write_text(ACCELERATE)
    command = [sys.executable, root / "script.py", Path(__file__).parent]
    places = [root / "exported", root / "loaded.pt", root / "saved"]
    subprocess.run([*map(str, [*command, *places])], check=True, capture_output=True)
    return root


def test_accelerate_loads_an_exported_folder_with_optimizer_schedule_and_generators(
    run: Any, accelerated: Path
) -> None:
    import random

    root, wanted = run
    state = torch.load(accelerated / "loaded.pt", weights_only=False)
    assert same(state["module"], dict(wanted))
    with Reader(root / SAVED) as reader:
        names = [name for n in (0, 1) for name in reader.json("state.json")["optimizers"]["main"]["groups"][n]["names"]]  # type: ignore
        assert len(state["optimizer"]["state"]) == len(names) == 7
        for number, name in enumerate(names):
            for key in ("exp_avg", "exp_avg_sq", "step"):
                value = state["optimizer"]["state"][number][key].numpy()
                assert value.tobytes() == reader.read(f"optimizer/main/{name}/{key}")
    groups = state["optimizer"]["param_groups"]
    assert [group["params"] for group in groups] == [[0, 1], [2, 3, 4, 5, 6]]
    assert [group["weight_decay"] for group in groups] == [0.01, 0.0]
    assert groups[0]["lr"] == pytest.approx(0.005 * (1 + math.cos(math.pi * STEPS / 20)))
    assert state["scheduler"]["last_epoch"] == STEPS
    from fabricate.checkpoint.state.logical import decode_with
    from fabricate.seeding import rng_state, set_rng_state

    before = rng_state()
    with Reader(root / SAVED) as reader:
        tree: Any = reader.json("rank-00000.json")
        set_rng_state(decode_with(reader, tree["rng"]))
    drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    set_rng_state(before)
    assert state["drawn"] == drawn


def test_an_export_never_overwrites_and_leaves_nothing_when_the_checkpoint_is_damaged(run: Any, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine")
    shown = invoke("export", run[0], tmp_path / "there")
    assert (shown.exit_code, (tmp_path / "there").read_text()) == (2, "mine")
    broken = shutil.copytree(run[0], tmp_path / "run")
    file = broken / SAVED / "data-00000-of-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    for kind in ("safetensors", "torch", "accelerate", "deepspeed"):
        shown = invoke("export", broken, tmp_path / "out", "--format", kind)
        assert shown.exit_code == 2
        assert "data-00000-of-00001.safetensors: block 0" in shown.stderr
        assert sorted(os.listdir(tmp_path)) == ["run", "there"]
    shown = invoke("export", run[0], tmp_path / "out", "--format", "safetensor")
    assert "did you mean 'safetensors'" in shown.stderr


def large(root: Path) -> Path:
    """A checkpoint of 256 MiB: eight weights of 16 MiB, each with one moment."""
    elements = 2**22
    staging = stage(root, 1, "a")
    names = [f"{part}{n}{key}" for n in range(8) for part, key in (("model/w", ""), ("optimizer/main/w", "/exp_avg"))]
    chunks = [
        Chunk(name, 0, elements, "F32", (elements,), lambda: np.ones(elements, "<f4").tobytes()) for name in names
    ]
    group = {"names": [f"w{n}" for n in range(8)], "options": {"lr": 0.1}}
    state = {
        "module": {},
        "optimizers": {"main": {"groups": [group], "values": {}}},
        "schedulers": {},
        "scaler": None,
        "progress": {"samples": 1, "skipped": 0},
    }
    files = (write_tensors(staging / "data.safetensors", chunks), write_json(staging / "state.json", state))
    settings: dict[str, Any] = {"topology": {"world_size": 1}, "created": "2031-05-01T12:00:00Z", "run_id": "r"}
    return commit(staging, Manifest(step=1, nonce="a", tensors=tensors_of(files), files=files, **settings))


def peak_memory(function: Callable[[], object]) -> int:
    """By how many bytes this process's own memory (files mapped into it aside) grew at most while `function` ran."""

    def own() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024

    event = threading.Event()
    before = highest = own()

    def watch() -> None:
        nonlocal highest
        while not event.wait(0.002):
            highest = max(highest, own())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        function()
    finally:
        event.set()
        watcher.join()
    return highest - before


def test_one_tensor_at_a_time_is_in_memory(tmp_path: Path) -> None:
    path = large(tmp_path)
    for kind in ("safetensors", "torch", "accelerate", "deepspeed"):
        shown: list[Result] = []
        out = tmp_path / kind
        grown = peak_memory(
            lambda kind=kind, out=out, shown=shown: shown.append(invoke("export", path, out, "--format", kind))
        )  # type: ignore[misc]
        assert shown[0].exit_code == 0, shown[0].stderr
        assert grown < 80 * 2**20, f"{kind}: {grown >> 20} MiB"  # of 256
    weights = load_file(tmp_path / "safetensors")
    assert peak_memory(lambda: fabricate.import_checkpoint(tmp_path / "torch", tmp_path / "imported")) < 80 * 2**20
    assert len(weights) == 8


# -- in


@pytest.mark.parametrize("folder", ["saved", "saved-bin"])
def test_a_folder_of_accelerate_becomes_a_checkpoint_that_a_module_loads(
    folder: str, run: Any, accelerated: Path, tmp_path: Path
) -> None:
    shown = invoke("import", accelerated / folder, tmp_path / "imported")
    assert (shown.exit_code, shown.stdout) == (0, f"wrote {tmp_path / 'imported'}\n")
    module = Net.load_from_checkpoint(tmp_path / "imported", width=5)
    assert same(module.state_dict(), dict(run[1]))
    assert module.tied.weight is module.first.weight
    assert module.scale.tolist() == [2.0] * 4  # no state dict has it: the module's own


def test_a_trainer_evaluates_what_was_imported(run: Any, accelerated: Path, tmp_path: Path) -> None:
    path = fabricate.import_checkpoint(accelerated / "saved", tmp_path / "imported")
    trainer = Trainer(progress=False)
    metrics, wanted = (trainer.validate(Net(), data(), checkpoint=c, batch_size=4) for c in (path, run[0] / SAVED))
    assert metrics == wanted


def lightning(path: Path, weights: dict[str, torch.Tensor], **parameters: Any) -> Path:
    """A file laid out as Lightning's documentation says: weights, hyper-parameters, counters, states of its parts."""
    torch.save(
        {
            "epoch": 1,
            "global_step": 250,
            "pytorch-lightning_version": "2.6.0",
            "state_dict": weights,
            "loops": {"fit_loop": {"state_dict": {}}},
            "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_path": "x.ckpt"}},
            "optimizer_states": [{"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}]}],
            "lr_schedulers": [],
            "hparams_name": "kwargs",
            "hyper_parameters": {"width": 5, "size": torch.Size([2]), **parameters},
        },
        path,
    )
    return path


def test_a_lightning_checkpoint_brings_its_weights_step_and_arguments(run: Any, tmp_path: Path) -> None:
    renamed = {f"net.{name}": value for name, value in run[1].items()}
    source = lightning(tmp_path / "last.ckpt", renamed)
    path = fabricate.import_checkpoint(source, tmp_path / "imported", rename={"net.": ""})
    with Reader(path) as reader:
        reader.verify()
        assert reader.manifest.step == 250
        assert dict(reader.manifest.aliases) == {"model/tied.weight": "model/first.weight"}
    module = Net.load_from_checkpoint(path)  # width=5 was recorded
    assert same(module.state_dict(), dict(run[1]))


class Shaped(TrainModule):
    """Its layer depends on a tuple and on an argument that JSON cannot hold."""

    def __init__(self, pad: tuple[int, int] = (1, 1), kinds: Any = None) -> None:
        super().__init__()
        self.pad, self.kinds = pad, kinds
        self.first = torch.nn.Linear(3, 5)


def test_the_arguments_of_a_lightning_checkpoint_are_restored_or_have_to_be_passed(tmp_path: Path) -> None:
    weights = dict(Shaped().state_dict())
    for name, parameters in (("tuple", {}), ("set", {"kinds": {1, 2}})):
        source = lightning(tmp_path / f"{name}.ckpt", weights, pad=(2, 3), **parameters)
        path = fabricate.import_checkpoint(source, tmp_path / name)
        if parameters:
            with pytest.raises(
                CheckpointError, match=r"arguments kinds of Shaped could not be recorded; pass them as well"
            ):
                Shaped.load_from_checkpoint(path)
        module = Shaped.load_from_checkpoint(path, **parameters)
        assert (module.pad, module.kinds) == ((2, 3), parameters.get("kinds"))
        assert same(module.state_dict(), weights)


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_plain_state_dicts_are_found_where_they_are(legacy: bool, run: Any, tmp_path: Path) -> None:
    weights = dict(run[1])
    layouts: dict[str, tuple[Any, str | None]] = {
        "plain": (weights, None),
        "nested": ({"state_dict": weights, "epoch": 3}, None),
        "named": ({"ema": weights, "step": 3}, "ema"),
    }
    for name, (content, key) in layouts.items():
        torch.save(content, tmp_path / name, _use_new_zipfile_serialization=not legacy)
        path = fabricate.import_checkpoint(tmp_path / name, tmp_path / f"{name}-out", key=key, step=7)
        with Reader(path) as reader:
            assert reader.manifest.step == 7
        assert same(Net.load_from_checkpoint(path, width=5).state_dict(), weights)


def test_sharded_weights_are_read_through_their_index(run: Any, tmp_path: Path) -> None:
    weights = {name: value for name, value in run[1].items() if name != "tied.weight"}
    names = sorted(weights)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: weights[name] for name in part}, tmp_path / file)
    table = {name: file for file, part in parts.items() for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    path = fabricate.import_checkpoint(tmp_path, tmp_path / "imported")
    assert same(Net.load_from_checkpoint(path).state_dict(), dict(run[1]))


def test_nothing_resumes_from_imported_weights(run: Any, tmp_path: Path) -> None:
    path = fabricate.import_checkpoint(run[0] / "model", tmp_path / "imported")
    with pytest.raises(CheckpointError, match=r"holds weights only.*Net\.load_from_checkpoint\("):
        Trainer(max_steps=1, progress=False).fit(Net(), data(), batch_size=4, resume=path)


@pytest.mark.parametrize(
    ("content", "options", "complaint"),
    [
        pytest.param([1, 2], {}, "holds a list, not a state dict", id="list"),
        pytest.param({"w": torch.ones(1), "epoch": 3}, {}, "'epoch' is not a tensor. Remove this entry", id="number"),
        pytest.param(
            {"ema": {"w": torch.ones(1)}}, {}, "If the state dict is nested, give its key: key='ema'", id="part"
        ),
        pytest.param({"ema": {"w": torch.ones(1)}}, {"key": "em"}, "did you mean 'ema'", id="key"),
        pytest.param(
            {"w": torch.ones(1)},
            {"rename": {"x.": ""}},
            "no tensor name begins with 'x.'. Give the beginning of a name; the names are w",
            id="rule",
        ),
        pytest.param({"a.w": torch.ones(1), "w": torch.ones(2)}, {"rename": {"a.": ""}}, "both become 'w'", id="clash"),
        pytest.param({}, {}, "holds no tensor", id="nothing"),
    ],
)
def test_a_source_that_does_not_fit_is_explained(content: Any, options: Any, complaint: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "source.pt")
    with pytest.raises(ConfigurationError, match=complaint):
        fabricate.import_checkpoint(tmp_path / "source.pt", tmp_path / "out", **options)
    assert os.listdir(tmp_path) == ["source.pt"]


def test_shards_of_other_tools_are_refused_with_what_makes_one_file_of_them(tmp_path: Path) -> None:
    for name, hint in (("pytorch_model_fsdp_0", "accelerate merge-weights"), ("latest", "zero_to_fp32.py")):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).mkdir()
        with pytest.raises(ConfigurationError, match=hint):
            fabricate.import_checkpoint(tmp_path / name, tmp_path / "out")
    with pytest.raises(ConfigurationError, match=r"holds none of model\.safetensors"):
        fabricate.import_checkpoint(tmp_path / "latest/latest", tmp_path / "out")


def test_an_import_never_overwrites(run: Any, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="exists already"):
        fabricate.import_checkpoint(run[0] / "model/model.safetensors", tmp_path / "out")
    assert os.listdir(tmp_path) == ["out"]
    shown = invoke("import", run[0] / "model", tmp_path / "new", "--rename", "first")
    assert (shown.exit_code, "give OLD=NEW" in shown.stderr) == (2, True)


def test_saving_and_resuming_load_nothing_that_reads_other_formats(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_convert import Net, data
from fabricate import Trainer
for steps in (2, 4):
    Trainer(max_steps=steps, seed=1, run_dir=sys.argv[2], progress=False).fit(Net(), data(), batch_size=4)
Net.load_from_checkpoint(sys.argv[2])
loaded = [name for name in sys.modules if name.startswith("fabricate.checkpoint.convert")]
assert loaded == [], loaded
assert "resumed" in Path(sys.argv[2], "events.jsonl").read_text()
"""
    arguments = [str(Path(__file__).parent), str(tmp_path / "run")]
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True)
