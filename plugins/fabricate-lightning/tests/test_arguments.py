"""The arguments of Lightning's Trainer: each has a counterpart, or is an error that names it."""

from __future__ import annotations

import datetime
import inspect
from pathlib import Path
from typing import Any

import fabricate_lightning
import lightning
import pytest
import torch
from fabricate_lightning import Trainer
from lightning_shapes import Classifier, by_fabricate, by_lightning, case, loader

from fabricate import ConfigurationError, Every

pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_arguments_and_their_defaults_are_those_of_lightning() -> None:
    theirs, ours = (inspect.signature(kind.__init__).parameters for kind in (lightning.Trainer, Trainer))
    assert {name: p.default for name, p in ours.items()} == {name: p.default for name, p in theirs.items()}
    for method in ("fit", "validate", "test", "predict"):
        assert [*inspect.signature(getattr(Trainer, method)).parameters] == [
            *inspect.signature(getattr(lightning.Trainer, method)).parameters
        ]


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        (
            {},
            {"max_epochs": 1000, "precision": "fp32", "validate_every": Every(epochs=1), "log_every": Every(steps=50)},
        ),
        ({"max_steps": 5}, {"max_epochs": None, "max_steps": 5}),
        ({"max_epochs": -1, "max_steps": 5}, {"max_epochs": None, "max_steps": 5}),
        ({"max_time": "00:01:30:00"}, {"max_time": Every(minutes=90)}),
        ({"max_time": {"hours": 2}}, {"max_time": Every(minutes=120)}),
        ({"max_time": datetime.timedelta(seconds=90)}, {"max_time": Every(minutes=1.5)}),
        ({"val_check_interval": 100, "accumulate_grad_batches": 4}, {"validate_every": Every(steps=25)}),
        ({"val_check_interval": 0.25}, {"validate_every": Every(epochs=0.25)}),
        ({"val_check_interval": "00:00:05:00"}, {"validate_every": Every(minutes=5)}),
        ({"check_val_every_n_epoch": 3}, {"validate_every": Every(epochs=3)}),
        ({"limit_val_batches": 0.0, "limit_train_batches": 1.0}, {"limit_val_batches": 0, "limit_train_batches": None}),
        ({"gradient_clip_val": 2, "gradient_clip_algorithm": "value"}, {"max_grad_norm": None, "max_grad_value": 2}),
        ({"precision": "bf16-mixed", "strategy": "fsdp"}, {"precision": "bf16", "strategy": "fsdp"}),
        ({"strategy": "deepspeed_stage_3_offload"}, {"strategy": "zero3:offload_optimizer=cpu,offload_param=cpu"}),
        ({"num_sanity_val_steps": -1}, {"sanity_batches": 10**9}),
        ({"devices": 1, "accelerator": "cpu"}, {}),
        ({"detect_anomaly": True, "deterministic": True}, {"detect_anomaly": True, "deterministic": True}),
        ({"enable_progress_bar": False, "min_epochs": 2}, {"progress": False, "min_epochs": 2}),
    ],
    ids=case,
)
def test_an_argument_becomes_its_counterpart(arguments: dict[str, Any], settings: dict[str, Any]) -> None:
    trainer = Trainer(**arguments, logger=False)
    assert {name: getattr(trainer.core.settings, name) for name in settings} == settings


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"benchmark": True}, r"benchmark=True\) has no counterpart in fabricate; set torch.backends"),
        ({"profiler": "simple"}, r"profiler='simple'\) has no counterpart"),
        ({"barebones": True}, "barebones=True"),
        ({"plugins": ["x"]}, "plugins="),
        ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs=1"),
        ({"num_nodes": 2}, "num_nodes=2"),
        ({"devices": 2}, r"devices=2\): 1 process was started.*fabricate run script.py --nproc 2"),
        ({"accelerator": "gpu"}, r"accelerator='gpu'\): this process would run on cpu"),
        ({"precision": "64-true"}, "precision='64-true'"),
        ({"strategy": "xla"}, "strategy='xla'"),
        ({"strategy": lightning.pytorch.strategies.DDPStrategy()}, "strategy=<"),
        ({"deterministic": "warn"}, "deterministic='warn'"),
        ({"max_epochs": -1}, r"max_epochs=-1\) never ends; give max_steps"),
        ({"max_time": "soon"}, r"max_time='soon'\): give 'DD:HH:MM:SS'"),
        (
            {"val_check_interval": 5, "accumulate_grad_batches": 2},
            "fabricate validates only between two updates; give a val_check_interval that is",
        ),
        (
            {"val_check_interval": 0.5, "check_val_every_n_epoch": 2},
            "fabricate supports only one of the two; leave one out",
        ),
        ({"gradient_clip_val": 1, "gradient_clip_algorithm": "x"}, "give 'norm' or 'value'"),
        ({"limit_train_batches": 0}, "leaves nothing to read"),
        ({"sync_batchnorm": 1, "model_registry": "x"}, "model_registry='x'"),
        ({"max_epochs": "three"}, "max_epochs='three'"),
    ],
    ids=case,
)
def test_an_argument_without_a_counterpart_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Trainer(**arguments)


def test_a_run_writes_where_lightning_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(2):  # by default as Lightning: a new folder for each run
        trainer = Trainer(max_epochs=1, enable_progress_bar=False)
        trainer.fit(Classifier(), loader())
        assert (
            Path(trainer.checkpoint_callback.best_model_path).parent
            == Path("lightning_logs", f"version_{number}", "checkpoints").absolute()
        )
    trainer = Trainer(max_epochs=1, enable_progress_bar=False, logger=False, default_root_dir="own")
    trainer.fit(Classifier(), loader())
    assert {path.name for path in (tmp_path / "own").iterdir()} >= {
        "checkpoints",
        "metrics.jsonl",
        "model",
        "plan.json",
    }
    trainer.save_checkpoint("copied")
    fabricate_lightning.load_from_checkpoint(Classifier, "copied")
    nowhere = Trainer(max_epochs=1, enable_progress_bar=False, logger=False)
    nowhere.fit(Classifier(), loader())
    assert {path.name for path in tmp_path.iterdir()} == {"lightning_logs", "own", "copied"}
    with pytest.raises(ConfigurationError, match="no fit has saved"):
        nowhere.save_checkpoint("more")


def test_a_ckpt_file_of_lightning_brings_its_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = by_lightning(Classifier(width=5), loader(), max_epochs=1)
    theirs.trainer.save_checkpoint(tmp_path / "one.ckpt")
    loaded = fabricate_lightning.load_from_checkpoint(Classifier, tmp_path / "one.ckpt")
    assert loaded.hparams.width == 5
    for name, value in theirs.weights.items():
        assert torch.equal(loaded.state_dict()[name], value)
    fresh = Classifier(width=5)
    trainer = Trainer(max_epochs=1, logger=False, enable_progress_bar=False)
    results = [
        t.validate(m, loader(number=20), ckpt_path=path, verbose=False)[0]
        for t, m, path in ((theirs.trainer, theirs.module, None), (trainer, fresh, str(tmp_path / "one.ckpt")))
    ]
    assert results[0] == pytest.approx(results[1], abs=1e-6)
    again = Classifier(width=5)
    trainer.fit(again, loader(), ckpt_path=tmp_path / "one.ckpt")
    assert "are loaded: the fit begins at step 0" in capsys.readouterr().out
    on = by_fabricate(loaded, loader(), max_epochs=1)
    assert on.module.losses == again.losses
