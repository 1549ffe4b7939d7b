"""The distributions that `fabricate plugins new` writes: one small plugin of each kind, which runs and passes its tests.

Pure text. Must not know: fabricate's other packages, or what is installed.
"""

from __future__ import annotations

import re
from pathlib import Path

from fabricate.errors import ConfigurationError

KINDS = ("strategy", "precision", "callback", "tracker")

_PYPROJECT = """\
[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "fabricate-@name@"
version = "0.1.0"
description = "A @kind@ for fabricate"
readme = "README.md"
requires-python = ">=3.11"
# A minor release may remove what was deprecated in the one before: test with it, then widen the range.
dependencies = ["fabricate-trainer@range@"]

[project.optional-dependencies]
test = ["pytest>=8"]

# The name on the left is the plugin's. Nothing is imported before somebody asks for it.
[project.entry-points.fabricate]
@name@ = "@entry@"

[tool.hatch.build.targets.wheel]
packages = ["src/@package@"]

[tool.pytest.ini_options]
testpaths = ["tests"]
addopts = ["--import-mode=importlib"]
filterwarnings = ["error"]
"""

_README = """\
# fabricate-@name@

A @kind@ for fabricate.

```bash
pip install .
fabricate plugins check
```

```python
@use@
```

Its tests run fabricate's conformance kit: `pip install -e '.[test]' && pytest`.
"""

_USE = {
    "strategy": 'Trainer(strategy="@name@", max_epochs=1)',
    "precision": 'Trainer(precision="@name@", max_epochs=1)',
    "callback": 'Trainer(plugins=["@name@:every=50"], max_epochs=1)',
    "tracker": 'Trainer(trackers=["@name@"], run_dir="runs/first", max_epochs=1)',
}

_REGISTERS = '''\
"""Offers the @kind@ "@name@". Imported whenever somebody looks for a name: keep it light, the work is in `@kind@`."""

from __future__ import annotations

from collections.abc import Callable

from fabricate import hookimpl


@hookimpl
def register_@kinds@(register: Callable[..., None]) -> None:
    register("@name@", "@package@.@kind@:@Class@", summary="one line for `fabricate plugins`")
'''

_CALLBACK_INIT = '"""A callback for fabricate: see `callback`."""\n'

_SOURCE = {
    "strategy": '''\
"""How parameters, gradients and optimizer state lie on the ranks."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from fabricate import DDP


@dataclasses.dataclass(eq=False)
class @Class@(DDP):
    """A replica on every rank, as in ddp. Say here what is different.

    Fields are options: Trainer(strategy="@name@:bucket_cap_mb=10"). Override what differs: `check` to refuse what cannot
    run, `prepare` to place and wrap the model, `backward`, `no_sync`, `grad_norm`; hear hooks by overriding them.
    """

    bucket_cap_mb: int = 50
    name: ClassVar[str] = "@name@"

    def describe(self) -> dict[str, str]:
        return {**super().describe(), "@name@": "what the plan should say"}
''',
    "precision": '''\
"""The dtypes in which a module computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import ClassVar

import torch

from fabricate import Precision, Strategy


@dataclasses.dataclass(eq=False)
class @Class@(Precision):
    """Matrix products in bfloat16 by autocast. Say here what is different.

    Fields are options: Trainer(precision="@name@:cache=false").
    """

    cache: bool = True
    name: ClassVar[str] = "@name@"
    mixed_precision: ClassVar[str] = "bf16"
    compute_dtype: ClassVar[str] = "bfloat16"

    def check(self, device: torch.device, strategy: Strategy) -> Iterable[str]:
        if device.type not in ("cpu", "cuda"):
            yield f"precision='@name@' was not tried on {device.type}: use precision='fp32'"

    def forward_context(self, device: torch.device) -> AbstractContextManager[object]:
        return torch.autocast(device.type, torch.bfloat16, cache_enabled=self.cache)
''',
    "callback": '''\
"""A callback: its hooks are called while a module trains."""

from __future__ import annotations

import dataclasses
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from fabricate import Callback, ConfigurationError

if TYPE_CHECKING:  # torch comes with it, and looking for plugins has to stay quick
    from fabricate import TrainModule


@dataclasses.dataclass(eq=False)
class @Class@(Callback):
    """Counts updates over all resumes and tells the number every `every` of them. Put your own work in its place.

    Fields are options: Trainer(plugins=["@name@:every=50"]). A hook's arguments are taken by name, any subset.
    """

    every: int = 100

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigurationError(f"@name@: every={self.every!r}: give a number of updates, 1 or more")
        self.count = 0

    def on_fit_start(self) -> None:
        self.count = 0

    def on_step(self, module: TrainModule, step: int) -> None:
        self.count += 1
        if self.count % self.every == 0:
            module.print(f"@name@: {self.count} updates, step {step}")

    def on_save(self, state: MutableMapping[str, Any]) -> None:
        state["count"] = self.count

    def on_load(self, state: MutableMapping[str, Any]) -> None:
        self.count = state["count"]
''',
    "tracker": '''\
"""Where metrics go while a module trains: one line of JSON per log boundary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker  # type: ignore[import-untyped]


class @Class@(GeneralTracker):  # type: ignore[misc]
    """Made on rank 0 when a fit begins; `log` is called there at every log boundary. Put your own work in its place.

    Arguments after the first two are options: Trainer(trackers=["@name@:prefix=a/"]).
    """

    name = "@name@"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str, prefix: str = "") -> None:
        super().__init__()
        self._file = (Path(logging_dir) / f"{run_name}-@name@.jsonl").open("a")
        self._prefix = prefix

    @property
    def tracker(self) -> Any:
        return self._file

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._write({"settings": values})

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self._write({"step": step, **{self._prefix + name: value for name, value in values.items()}})

    def finish(self) -> None:
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\\n")
''',
}

_KIT = '''\
"""The conformance kit runs real fits with the @kind@, on several ranks of this machine."""

from __future__ import annotations

from fabricate.testing import check_@check@


def test_it_keeps_what_a_@kind@_promises() -> None:
    check_@check@("@name@")
'''

_TRACKER_TEST = '''\
"""A real fit with the tracker."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from fabricate import Trainer, TrainModule


class Regression(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_every_log_boundary_is_written(tmp_path: Path) -> None:
    trainer = Trainer(trackers=["@name@"], run_dir=tmp_path, max_steps=3, log_every=1, progress=False)
    trainer.fit(Regression(), torch.randn(12, 4), batch_size=4)
    settings, *lines = (tmp_path / "trackers" / "fabricate-@name@.jsonl").read_text().splitlines()
    assert json.loads(settings)["settings"]["max_steps"] == 3
    assert [json.loads(line)["step"] for line in lines if "lr" in json.loads(line)] == [1, 2, 3]
'''


def files(name: str, kind: str, version: str) -> dict[str, str]:
    """The text of every file of the distribution fabricate-`name`, by path. `version`: the version of fabricate."""
    package = f"fabricate_{name.replace('-', '_')}"
    plural = {"strategy": "strategies", "precision": "precisions", "tracker": "trackers"}.get(kind, "")
    title = "".join(part.capitalize() for part in name.split("-"))

    major, minor = version.split(".")[:2]
    words = {
        "name": name,
        "kind": kind,
        "kinds": plural,
        "package": package,
        "Class": title,
        "entry": f"{package}.callback:{title}" if kind == "callback" else package,
        "check": "plugin" if kind == "callback" else kind,
        "range": f">={version},<{major}.{int(minor) + 1}",
        "use": _USE[kind].replace("@name@", name),
    }
    written = {
        "pyproject.toml": _PYPROJECT,
        "README.md": _README,
        f"src/{package}/__init__.py": _CALLBACK_INIT if kind == "callback" else _REGISTERS,
        f"src/{package}/{kind}.py": _SOURCE[kind],
        f"tests/test_{package}.py": _TRACKER_TEST if kind == "tracker" else _KIT,
    }
    return {path: re.sub(r"@(\w+)@", lambda found: words[found[1]], text) for path, text in written.items()}


def write(name: str, kind: str, into: Path, version: str) -> Path:
    """Write the distribution into a new directory below `into`; return the directory."""
    name = name.removeprefix("fabricate-")
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise ConfigurationError(
            f"NAME {name!r}: use small letters, digits and single hyphens, beginning with a letter"
        )
    root = into / f"fabricate-{name}"
    if root.exists():
        raise ConfigurationError(f"{str(root)!r} exists already; choose another NAME, or another place with --into DIR")
    for path, text in files(name, kind, version).items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return root
