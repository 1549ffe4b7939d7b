"""HubPush and `fabricate push` against a hub on the loopback address, through the real huggingface_hub."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner
from huggingface_hub import constants
from safetensors.torch import load, load_file, save_file

from fabricate import Callback, CheckpointError, ConfigurationError, FabricateError, HubPush, Trainer, TrainModule
from fabricate.callbacks.model_card import write_card
from fabricate.checkpoint.convert.exporting import export
from fabricate.cli.main import main
from fabricate.testing import run_ranks
from tests.support.hub import TOKEN, Hub, serving

pytestmark = pytest.mark.filterwarnings(
    "ignore:Use 'content=:DeprecationWarning"
)  # huggingface_hub, when it sends through LFS
ROWS = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.layer(batch) - 1).square().mean()

    def validation_step(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.training_step(batch)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class InParts(Net):
    """Exports two files of weights, and a card of its own."""

    def export(self, path: Path) -> None:
        for name, tensor in self.state_dict().items():
            save_file({name: tensor}, path / f"{name}.safetensors")
        (path / "README.md").write_text("---\nlicense: mit\ntags: [mine]\n---\n\n# My words\n")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with serving(tmp_path / "storage") as started:
        yield started


@pytest.fixture
def plain_lfs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # what the variable of this name sets at import


def fit(hub: str, run_dir: Path, module: TrainModule | None = None, *plugins: Any, **options: Any) -> HubPush:
    push = HubPush("tiny", endpoint=hub, token=options.pop("token", TOKEN), **options)
    trainer = Trainer(
        max_epochs=2, run_dir=run_dir, save_every="2 steps", plugins=[push, *plugins], seed=1, progress=False
    )
    trainer.fit(module or Net(), ROWS, ROWS, batch_size=4)
    return push


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == kind]


@pytest.mark.parametrize("through", ["xet", "lfs"])
def test_the_model_is_pushed_at_the_end_with_a_card(
    hub: Hub, tmp_path: Path, request: pytest.FixtureRequest, through: str
) -> None:
    if through == "lfs":
        request.getfixturevalue("plain_lfs")
    run_dir = tmp_path / "run"
    fit(hub.url, run_dir, license="apache-2.0", datasets=["me/rows"], private=True)
    assert hub.created[0] == {"name": "tiny", "organization": None, "visibility": "private"}
    assert sorted(hub.repositories["me/tiny"]) == ["README.md", "model.safetensors"]
    assert (hub.objects == {}) is (through == "xet")
    if through == "lfs":
        assert list(hub.objects.values()) == [(run_dir / "model" / "model.safetensors").read_bytes()]
    assert [line["url"] for line in events(run_dir, "pushed")] == [f"{hub.url}/me/tiny/commit/{1:040x}"]

    card = hub.texts["README.md"].decode()
    metadata = yaml.safe_load(card.split("---")[1])
    assert metadata["license"] == "apache-2.0"
    assert (metadata["datasets"], metadata["tags"], metadata["library_name"]) == (["me/rows"], ["fabricate"], "pytorch")
    (result,) = metadata["model-index"][0]["results"]
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    line = [line for line in lines if line["stage"] == "validate"][-1]
    assert (result["dataset"]["type"], result["metrics"][0]["name"]) == ("me/rows", "val_loss")
    assert result["metrics"][0]["value"] == line["metrics"]["val_loss"]
    started = events(run_dir, "started")[-1]
    for row in (
        "| precision | fp32 |",
        "| global batch size | 4 |",
        "| learning rate | 0.1 |",
        f"| fingerprint | {started['data']['fingerprint']} |",
        f"| torch | {started['versions']['torch']} |",
    ):
        assert row in card
    assert str(tmp_path) not in card


def test_a_push_that_failed_half_way_goes_on_where_it_was(
    hub: Hub, tmp_path: Path, plain_lfs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    hub.refuse, hub.allow = "/storage/", 1
    with pytest.raises(FabricateError, match="storage is full") as caught:
        fit(hub.url, run_dir, InParts())
    assert f"To push it again: fabricate push {run_dir} me/tiny" in str(caught.value)
    assert (len(hub.sent), hub.commits) == (1, [])
    assert load_file(run_dir / "model" / "layer.bias.safetensors")["layer.bias"].shape == (1,)
    assert (run_dir / "checkpoints" / "step-00000008").is_dir()

    hub.refuse = ""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)  # what HF_ENDPOINT sets at import
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    result = CliRunner().invoke(main, ["push", str(run_dir), "me/tiny", "--message", "again"])
    assert result.exit_code == 0, result.output
    assert f"{hub.url}/me/tiny/commit/" in result.output
    assert len(hub.sent) == len(set(hub.sent)) == 2
    assert [(message, sorted(paths)) for message, paths in hub.commits] == [
        ("again", ["README.md", "layer.bias.safetensors", "layer.weight.safetensors"])
    ]
    card = hub.texts["README.md"].decode()
    assert "# My words" in card
    assert yaml.safe_load(card.split("---")[1])["tags"] == ["mine"]

    assert CliRunner().invoke(main, ["push", str(run_dir), "me/tiny", "--license", "gpl-3.0"]).exit_code == 0
    assert len(hub.sent) == 2
    again = hub.texts["README.md"].decode()
    assert again == card.replace("license: mit", "license: gpl-3.0"), "the text does not grow"


class Repairs(Callback):
    """Waits until a push has ended, so that the next save finds none under way, and repairs the hub after the first save."""

    def __init__(self, hub: Hub, run_dir: Path) -> None:
        self.hub, self.run_dir = hub, run_dir
        self.weights: dict[int, torch.Tensor] = {}
        self.goes_on: list[bool] = []

    def on_step(self, module: Any, step: int) -> None:
        self.weights[step] = module.layer.weight.detach().clone()
        if step % 2:
            while len(events(self.run_dir, "pushed") + events(self.run_dir, "push_failed")) < step // 2:
                time.sleep(0.01)
            self.goes_on += [b"that goes on" in card for name, card in self.hub.texts.items() if name == "README.md"]
        if step == 3:
            self.hub.refuse = ""


def test_saves_are_pushed_and_one_that_fails_is_a_note_and_pushed_with_the_next(
    hub: Hub, tmp_path: Path, plain_lfs: None, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, hub.refuse = tmp_path / "run", "/storage/"
    repairs = Repairs(hub, run_dir)
    fit(hub.url, run_dir, None, repairs, at="saves")
    assert [line["step"] for line in events(run_dir, "push_failed")] == [2]
    assert "note: step 2: pushing" in capsys.readouterr().err
    messages = [message for message, _ in hub.commits]
    # At the end the weights are there already; the card says no longer that the run goes on.
    assert messages == ["step 4", "step 6", "step 8", "the end of the fit, step 8"]
    assert repairs.goes_on == [True, True]
    assert b"that goes on" not in hub.texts["README.md"]
    weights = []
    for digest in dict.fromkeys(hub.sent):
        weights.append(load(hub.objects[digest])["layer.weight"])
    for step, weight in zip((4, 6, 8), weights, strict=True):
        torch.testing.assert_close(weight, repairs.weights[step], rtol=0, atol=0)
    assert not (run_dir / ".hub-model").exists()


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("offline", "HF_HUB_OFFLINE is set"),
        ("no token", "LocalTokenNotFoundError"),
        ("a wrong token", "Invalid user token"),
        ("no answer", "127.0.0.1:9 is not possible"),
        ("no run_dir", "Set Trainer\\(run_dir"),
        ("no right to create it", "storage is full"),
    ],
)
def test_what_cannot_be_pushed_is_an_error_before_the_first_step(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, text: str
) -> None:
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", case == "offline")
    hub.refuse = "/repos/create" if case.startswith("no right") else ""
    token = None if case == "no token" else "hf_other" if case == "a wrong token" else TOKEN
    url = "http://127.0.0.1:9" if case == "no answer" else hub.url
    module, run_dir = Net(), None if case == "no run_dir" else tmp_path / "run"
    push = HubPush("me/tiny", endpoint=url, token=token)
    before = module.layer.weight.detach().clone()
    with pytest.raises(ConfigurationError, match=text):
        Trainer(max_steps=1, run_dir=run_dir, plugins=[push], progress=False).fit(module, ROWS, batch_size=4)
    torch.testing.assert_close(module.layer.weight.detach(), before, rtol=0, atol=0)


def test_wrong_arguments_are_errors_that_name_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"HubPush\(at='end of fit'\)"):
        HubPush("me/tiny", at="end of fit")
    with pytest.raises(ConfigurationError, match="give a list of names"):
        HubPush("me/tiny", datasets="me/rows")
    with pytest.raises(ConfigurationError, match="repo=''"):
        HubPush("")
    result = CliRunner().invoke(main, ["push", str(tmp_path), "me/tiny"])
    assert (result.exit_code, "has no folder model/" in result.output) == (2, True)


def on_two_ranks(hub: str, run_dir: Path) -> str:
    try:
        fit(hub, run_dir, at="saves")
    except FabricateError as exc:
        return str(exc)
    return ""


def test_of_two_ranks_one_pushes_and_a_failure_ends_both(hub: Hub, tmp_path: Path) -> None:
    assert run_ranks(on_two_ranks, 2, hub.url, tmp_path / "one") == ["", ""]
    assert len(hub.created) == 1
    assert hub.commits[-1][0].endswith("step 4")
    hub.refuse = "/preupload"
    failed = run_ranks(on_two_ranks, 2, hub.url, tmp_path / "two")
    assert "storage is full" in failed[0]
    assert "rank 0 could not push the model" in failed[1]


class Exports(Callback):
    def on_saved(self, trainer: Trainer) -> None:
        trainer.export(trainer.run_dir / "now")


class ExportsInEvaluations(Net):
    def validation_step(self, batch: Any) -> Any:
        return {"loss": self.training_step(batch)}

    def on_eval_end(self) -> None:
        self.trainer.export(self.trainer.run_dir / f"evaluated-{self.trainer.step}")

    def on_epoch_end(self) -> None:
        self.trainer.export(self.trainer.run_dir / f"epoch-{self.trainer.step}")


def test_weights_can_be_exported_at_the_end_of_an_evaluation_or_epoch(tmp_path: Path) -> None:
    Trainer(max_epochs=2, run_dir=tmp_path, progress=False).fit(
        ExportsInEvaluations(), ROWS, ROWS, batch_size=len(ROWS)
    )
    folders = {path.parent.name: load_file(path)["layer.weight"] for path in tmp_path.glob("*/model.safetensors")}
    assert folders.keys() == {"epoch-1", "evaluated-1", "epoch-2", "evaluated-2", "model"}
    assert torch.equal(folders["epoch-1"], folders["evaluated-1"])
    assert torch.equal(folders["evaluated-2"], folders["model"])
    assert not torch.equal(folders["epoch-1"], folders["epoch-2"])


def test_an_export_during_an_update_is_an_error(tmp_path: Path) -> None:
    class Early(Net):
        def on_step(self) -> None:
            self.trainer.export(tmp_path / "early")

    with pytest.raises(FabricateError, match="cannot run during an update"):
        Trainer(max_steps=1, progress=False).fit(Early(), ROWS, batch_size=4)


def test_an_export_replaces_nothing(tmp_path: Path) -> None:
    trainer = Trainer(max_steps=1, run_dir=tmp_path / "run", plugins=[Exports()], progress=False)
    trainer.fit(Net(), ROWS, batch_size=4)
    for folder in ("now", "model"):
        assert load_file(tmp_path / "run" / folder / "model.safetensors")["layer.weight"].shape == (1, 4)
    trainer = Trainer(max_steps=2, run_dir=tmp_path / "run", plugins=[Exports()], progress=False)
    with pytest.raises(CheckpointError, match="exists already"):
        trainer.fit(Net(), ROWS, batch_size=4)


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, trainer: Trainer, step: int) -> None:
        if step == self.step:
            assert trainer.run_dir is not None
            (trainer.run_dir / "stop").touch()
            time.sleep(1.5)  # the file is looked for once per second


def _card(run_dir: Path) -> str:
    write_card(run_dir, run_dir / "model", "me/tiny")
    return (run_dir / "model" / "README.md").read_text()


def test_a_card_has_the_validation_of_the_weights_in_model_or_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fit(epochs: int, *plugins: Any, **options: Any) -> None:
        trainer = Trainer(max_epochs=epochs, run_dir=tmp_path, seed=1, progress=False, plugins=plugins, **options)
        trainer.fit(Net(), ROWS, ROWS, batch_size=4)

    best: Any = {"load_best": True, "keep": {"last": 1, "best": 1, "metric": "val_loss"}}
    fit(1)
    assert "## Validation, step 4" in _card(tmp_path)
    weights = (tmp_path / "model" / "model.safetensors").read_bytes()
    fit(9, StopAt(8))
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == weights
    assert "training continues at step 4. Until this fit completes, RUN_DIR/model/ holds" in capsys.readouterr().err
    card = _card(tmp_path)
    assert "## Validation" not in card
    assert "model-index" not in card
    assert "their validation is not known" in card
    fit(3)
    assert "## Validation, step 12" in _card(tmp_path)
    write_card(tmp_path, tmp_path / "model", "me/tiny", step=8)  # a push in the background, which the fit has overtaken
    card = (tmp_path / "model" / "README.md").read_text()
    assert "These are the weights of step 8 of a training run that goes on" in card
    assert "## Validation, step 8" in card
    fit(3)  # already complete
    assert "## Validation, step 12" in _card(tmp_path)
    assert "RUN_DIR/model/ holds" in capsys.readouterr().err  # of the third fit alone
    fit(9, StopAt(16), **best)
    shutil.rmtree(tmp_path / "model")
    (tmp_path / "model").mkdir()
    export(tmp_path, tmp_path / "model" / "model.safetensors", "safetensors")
    assert "## Validation" not in _card(tmp_path)


class BestAtEight(Net):
    """Its loss is smallest before the first update, which no checkpoint has, then at update 8."""

    def validation_step(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        assert self.trainer is not None
        return {"loss": torch.tensor(1.0 + abs(self.trainer.step - 8) if self.trainer.step else 0.0)}


def test_the_card_of_the_best_weights_has_their_validation_and_not_the_one_before_training(tmp_path: Path) -> None:
    keep: Any = {"last": 1, "best": 1, "metric": "val_loss"}
    trainer = Trainer(max_epochs=3, run_dir=tmp_path, load_best=True, keep=keep, validate_first=True, progress=False)
    result = trainer.fit(BestAtEight(), ROWS, ROWS, batch_size=4)
    assert result.best_checkpoint == tmp_path / "checkpoints" / "step-00000008"
    assert "## Validation, step 8\n\n| metric | value |\n|---|---|\n| val_loss | 1 |" in _card(tmp_path)
    assert "These are the weights of step" not in _card(tmp_path)
    (exported,) = events(tmp_path, "exported")
    assert (exported["best"], exported["step"], exported["of_step"]) == (True, 12, 8)


def test_the_card_says_that_the_last_validation_was_of_earlier_weights(tmp_path: Path) -> None:
    Trainer(max_steps=7, validate_every=4, run_dir=tmp_path, progress=False).fit(Net(), ROWS, ROWS, batch_size=4)
    card = _card(tmp_path)
    assert "## Validation, step 4\n" in card
    assert "These are the weights of step 7. The table shows the last validation before it." in card


def test_a_fit_that_is_refused_leaves_the_plan_of_the_run(tmp_path: Path) -> None:
    def fit(batch_size: int) -> None:
        trainer = Trainer(max_epochs=2, run_dir=tmp_path, seed=1, progress=False)
        trainer.fit(Net(), ROWS, ROWS, batch_size=batch_size)

    fit(4)
    before = (tmp_path / "plan.json").read_bytes()
    with pytest.raises(CheckpointError, match="saved with global_batch_size=4"):
        fit(8)
    assert (tmp_path / "plan.json").read_bytes() == before
