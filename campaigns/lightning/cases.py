"""The public code of the campaign: its place, its setup, and its use by its own scripts.

Sizes are cut so that a case takes seconds on a CPU; classes are as they are in the checkout.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from campaigns.lightning import fakes, sources

DEMOS = "src/lightning/pytorch/demos"
_MNIST = "src/models/mnist_module.py"
_CIFAR = "lightning_examples/cifar10-baseline/baseline.py"
_GLUE = "lightning_examples/text-transformers/notebook.py"
_ENERGY = "course_UvA-DL/07-deep-energy-based-generative-models/notebook.py"


@dataclass
class Setup:
    """One case, ready to run."""

    make: Callable[[], Any]
    """The module, with the same weights each time."""
    data: Callable[[], dict[str, Any]] | None
    """Arguments of `fit`, with rows in the same order for two trainers; None if the code draws random rows."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments of the Trainer."""
    own_data: Callable[[], dict[str, Any]] | None = None
    """Arguments of `fit` as in the code's own script, if that shuffles."""
    own_arguments: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the Trainer with the code's own data."""
    stages: tuple[str, ...] = ()
    """The stages after the fit: "validate", "test", "predict"."""


@dataclass(frozen=True)
class Case:
    """Public code, and its setup."""

    name: str
    file: str
    prepare: Callable[[Path], Setup]
    """Called with the checkout, in a separate working directory."""
    repository: str
    note: str = ""
    """The change to the code for the comparison."""


def seeded(make: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        fakes.seed(0)
        return make()

    return run


def boring(root: Path, name: str, stages: tuple[str, ...] = ("validate", "test", "predict")) -> Setup:
    demos = sources.module(root / DEMOS / "boring_classes.py")
    torch.manual_seed(1)
    sets = [demos.RandomDataset(32, 64) for _ in range(2)]

    def data() -> dict[str, Any]:
        train, val = (DataLoader(rows, generator=torch.Generator()) for rows in sets)
        return {"train_dataloaders": train, "val_dataloaders": val}

    return Setup(seeded(getattr(demos, name)), data, {"max_epochs": 2}, stages=stages)


def boring_data(root: Path, kind: str) -> Setup:
    demos = sources.module(root / DEMOS / "boring_classes.py")
    torch.manual_seed(1)
    datamodule = getattr(demos, kind)()
    arguments = {"max_epochs": 2, "limit_train_batches": 8, "limit_val_batches": 4, "limit_test_batches": 4}

    def loaders() -> dict[str, Any]:
        return {"datamodule": datamodule}

    if kind == "BoringDataModuleNoLen":  # its data sets draw random rows while they are read
        return Setup(seeded(demos.BoringModel), None, arguments, own_data=loaders)
    return Setup(seeded(demos.BoringModel), loaders, arguments, stages=("test",))


def demo_model(root: Path) -> Setup:
    demos = sources.module(root / DEMOS / "boring_classes.py")
    torch.manual_seed(1)
    rows = demos.RandomDataset(32, 64)
    return Setup(seeded(demos.DemoModel), lambda: {"train_dataloaders": DataLoader(rows)}, {"max_epochs": 1})


def language(root: Path, file: str, name: str) -> Setup:
    fakes.text(Path("data/wikitext-2.txt"))
    demo = sources.module(root / DEMOS / file)
    words = sources.module(root / DEMOS / "transformer.py").WikiText2().vocab_size
    make = seeded(functools.partial(getattr(demo, name), vocab_size=words))

    def data() -> dict[str, Any]:
        loader = make().train_dataloader()
        loader.generator = torch.Generator()
        return {"train_dataloaders": loader}

    return Setup(make, data, {"max_epochs": 2, "limit_train_batches": 6}, own_data=dict)


def gan(root: Path) -> Setup:
    fakes.digits(Path("data/MNIST/complete"))
    template = sources.module(root / "examples/pytorch/domain_templates/generative_adversarial_net.py")
    if not template._TORCHVISION_AVAILABLE:
        raise sources.Missing("torchvision is not installed")

    def datamodule() -> Any:
        return template.MNISTDataModule(num_workers=0, val_split=32)

    def data() -> dict[str, Any]:
        source = datamodule()
        source.setup("fit")
        return {"train_dataloaders": fakes.in_order(source.train_dataloader())}

    arguments = {"max_epochs": 2, "logger": True}
    return Setup(seeded(template.GAN), data, arguments, own_data=lambda: {"datamodule": datamodule()})


def _cifar(root: Path) -> Any:
    try:
        import torchvision
    except ImportError as exc:
        raise sources.Missing("torchvision is not installed") from exc
    torchvision.datasets.CIFAR10 = fakes.images("CIFAR10", 48)
    return sources.definitions(root / _CIFAR, without=("pandas", "seaborn", "IPython"))


def cifar(root: Path, swa: bool) -> Setup:
    from torchvision import transforms

    baseline = _cifar(root)
    sets = [baseline.CIFAR10(".", train=train, transform=transforms.ToTensor()) for train in (True, False)]

    def data() -> dict[str, Any]:
        train, val = (DataLoader(rows, batch_size=16, generator=torch.Generator()) for rows in sets)
        return {"train_dataloaders": train, "val_dataloaders": val}

    def shuffled() -> dict[str, Any]:
        return {**data(), "train_dataloaders": DataLoader(sets[0], batch_size=16, shuffle=True)}

    def make() -> Any:
        return baseline.SWAResnet(baseline.create_model(), lr=0.01) if swa else baseline.LitResnet(lr=0.05)

    from pytorch_lightning.callbacks import LearningRateMonitor
    from pytorch_lightning.loggers import CSVLogger

    arguments: dict[str, Any] = {"max_epochs": 2, "logger": lambda: CSVLogger(save_dir="logs/")}
    arguments["callbacks"] = lambda: [LearningRateMonitor(logging_interval="step")]
    return Setup(seeded(make), data, arguments, own_data=shuffled, stages=("test",))


def glue(root: Path, task: str) -> Setup:
    fakes.old_names()
    notebook = sources.definitions(root / _GLUE)
    model = fakes.bert(Path("bert").absolute())

    def datamodule() -> Any:
        return notebook.GLUEDataModule(model_name_or_path=model, task_name=task, max_seq_length=16, train_batch_size=8)

    def make() -> Any:
        source = datamodule()
        source.setup("fit")
        options = {"num_labels": source.num_labels, "eval_splits": source.eval_splits, "task_name": task}
        return notebook.GLUETransformer(model, learning_rate=1e-3, warmup_steps=2, **options).train()

    def data() -> dict[str, Any]:
        source = datamodule()
        source.setup("fit")
        val = source.val_dataloader()
        several = [fakes.in_order(each) for each in (val if isinstance(val, list) else [val])]
        return {"train_dataloaders": fakes.in_order(source.train_dataloader()), "val_dataloaders": several}

    arguments = {"max_epochs": 2, "num_sanity_val_steps": 0 if task == "mnli" else 2}
    return Setup(seeded(make), data, arguments, own_data=lambda: {"datamodule": datamodule()})


def mnist(root: Path) -> Setup:
    try:
        import torchvision
    except ImportError as exc:
        raise sources.Missing("torchvision is not installed") from exc
    torchvision.datasets.MNIST = fakes.images("MNIST")
    sys.path.insert(0, str(root))
    from src.data.mnist_datamodule import MNISTDataModule
    from src.models.components.simple_dense_net import SimpleDenseNet
    from src.models.mnist_module import MNISTLitModule

    def make() -> Any:
        return MNISTLitModule(
            net=SimpleDenseNet(lin1_size=64, lin2_size=128, lin3_size=64),
            optimizer=functools.partial(torch.optim.Adam, lr=0.001),
            scheduler=functools.partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=1),
            compile=False,
        )

    def datamodule() -> Any:
        return MNISTDataModule(batch_size=16, train_val_test_split=(128, 32, 32))

    def data() -> dict[str, Any]:
        source = datamodule()
        source.setup("fit")
        return {
            "train_dataloaders": fakes.in_order(source.train_dataloader()),
            "val_dataloaders": source.val_dataloader(),
        }

    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

    def callbacks() -> list[Any]:
        best = ModelCheckpoint("kept", monitor="val/acc", mode="max", save_last=True, filename="epoch_{epoch:03d}")
        return [best, EarlyStopping("val/acc", mode="max", patience=100)]

    arguments = {"max_epochs": 3, "callbacks": callbacks, "enable_checkpointing": True}
    return Setup(seeded(make), data, arguments, own_data=lambda: {"datamodule": datamodule()}, stages=("test",))


def graph_sage(root: Path) -> Setup:
    example = sources.module(root / "examples/pytorch_lightning/graph_sage.py")
    from pytorch_lightning.callbacks import ModelCheckpoint

    batches = [fakes.graph() for _ in range(4)]

    def callbacks() -> list[Any]:
        return [ModelCheckpoint("kept", monitor="val_acc", save_top_k=1, mode="max")]

    def data() -> dict[str, Any]:
        train, val = (DataLoader(some, batch_size=None, generator=torch.Generator()) for some in (batches, batches[:2]))
        return {"train_dataloaders": train, "val_dataloaders": val}

    make = seeded(lambda: example.Model(8, 3, hidden_channels=16))
    arguments = {"max_epochs": 3, "callbacks": callbacks, "enable_checkpointing": True}
    return Setup(make, data, arguments, stages=("test",))


def gin(root: Path) -> Setup:
    example = sources.module(root / "examples/pytorch_lightning/gin.py")
    from pytorch_lightning.callbacks import ModelCheckpoint
    from torch_geometric.data.lightning import LightningDataset

    graphs = fakes.graphs()

    def datamodule() -> Any:
        return LightningDataset(graphs[:32], graphs[32:40], graphs[40:], batch_size=8, pin_memory=False)

    def data() -> dict[str, Any]:
        source = datamodule()
        train, val = (fakes.in_order(each) for each in (source.train_dataloader(), source.val_dataloader()))
        return {"train_dataloaders": train, "val_dataloaders": val}

    def callbacks() -> list[Any]:
        return [ModelCheckpoint("kept", monitor="val_acc", save_top_k=1, mode="max")]

    make = seeded(lambda: example.Model(8, 3, hidden_channels=16))
    arguments = {"max_epochs": 3, "log_every_n_steps": 5, "callbacks": callbacks, "enable_checkpointing": True}
    return Setup(make, data, arguments, own_data=lambda: {"datamodule": datamodule()}, stages=("test",))


def energy(root: Path) -> Setup:
    try:
        notebook = sources.definitions(root / _ENERGY, without=("matplotlib", "matplotlib_inline"))
    except ImportError as exc:
        raise sources.Missing("torchvision is not installed") from exc
    notebook.device = torch.device("cpu")  # its script sets it
    rows = TensorDataset(torch.rand(32, 1, 28, 28, generator=torch.Generator().manual_seed(0)) * 2 - 1, torch.zeros(32))

    def callbacks() -> list[Any]:
        best = notebook.ModelCheckpoint(
            "kept", save_weights_only=True, mode="min", monitor="val_contrastive_divergence"
        )
        return [best, notebook.GenerateCallback(), notebook.SamplerCallback(), notebook.OutlierCallback()]

    def data(**options: Any) -> dict[str, Any]:
        return {"train_dataloaders": DataLoader(rows, batch_size=8, drop_last=True, **options)}

    def whole() -> dict[str, Any]:
        return {**data(shuffle=True), "val_dataloaders": DataLoader(rows, batch_size=16)}

    make = seeded(lambda: notebook.DeepEnergyModel(img_shape=(1, 28, 28), batch_size=8, lr=1e-4, beta1=0.0))
    own = {"callbacks": callbacks, "enable_checkpointing": True}
    arguments = {"max_epochs": 2, "gradient_clip_val": 0.1}
    return Setup(make, lambda: data(generator=torch.Generator()), arguments, own_data=whole, own_arguments=own)


_LIGHTNING, _TUTORIALS = "Lightning-AI/pytorch-lightning", "Lightning-AI/tutorials"
_TRAINS = "after `.train()`, because Lightning leaves it in eval mode, in which transformers loads it"
_MNLI = f"{_TRAINS}; without the validation check before training, because under Lightning the module keeps the check's outputs"
_BORING, _TEMPLATES = f"{DEMOS}/boring_classes.py", "examples/pytorch/domain_templates"
CASES = (
    Case("BoringModel", _BORING, lambda root: boring(root, "BoringModel"), _LIGHTNING),
    Case("ManualOptimBoringModel", _BORING, lambda root: boring(root, "ManualOptimBoringModel"), _LIGHTNING),
    Case("DemoModel", _BORING, demo_model, _LIGHTNING),
    Case("BoringDataModule", _BORING, lambda root: boring_data(root, "BoringDataModule"), _LIGHTNING),
    Case("BoringDataModuleNoLen", _BORING, lambda root: boring_data(root, "BoringDataModuleNoLen"), _LIGHTNING),
    Case("LightningLSTM", f"{DEMOS}/lstm.py", lambda root: language(root, "lstm.py", "LightningLSTM"), _LIGHTNING),
    Case(
        "LightningTransformer",
        f"{DEMOS}/transformer.py",
        lambda root: language(root, "transformer.py", "LightningTransformer"),
        _LIGHTNING,
    ),
    Case("GAN", f"{_TEMPLATES}/generative_adversarial_net.py", gan, _LIGHTNING),
    Case("LitResnet", _CIFAR, lambda root: cifar(root, swa=False), _TUTORIALS),
    Case("SWAResnet", _CIFAR, lambda root: cifar(root, swa=True), _TUTORIALS),
    Case("GLUETransformer, cola", _GLUE, lambda root: glue(root, "cola"), _TUTORIALS, _TRAINS),
    Case("GLUETransformer, mnli", _GLUE, lambda root: glue(root, "mnli"), _TUTORIALS, _MNLI),
    Case("MNISTLitModule", _MNIST, mnist, "ashleve/lightning-hydra-template"),
    Case("DeepEnergyModel", _ENERGY, energy, _TUTORIALS, "compared without validation, which draws random numbers"),
    Case("graph_sage", "examples/pytorch_lightning/graph_sage.py", graph_sage, "pyg-team/pytorch_geometric"),
    Case("gin", "examples/pytorch_lightning/gin.py", gin, "pyg-team/pytorch_geometric"),
)


def named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def prepared(name: str, checkouts: Iterable[Path], folder: Path) -> Setup:
    """The case `name`, from one of `checkouts`. Changes the working directory to `folder`."""
    case = named(name)
    root = sources.find(checkouts, case.file).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    return case.prepare(root)
