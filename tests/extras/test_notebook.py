"""The progress bar in a notebook that a kernel runs: one output that is replaced, not a line per update. The plan in a notebook."""

from __future__ import annotations

from typing import Any

import nbclient
import nbformat
import pytest

CELLS = """
import time
import torch
from fabricate import Callback, Trainer, TrainModule

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch):
        return self.layer(batch).square().mean()

    def validation_step(self, batch):
        return {"loss": self.training_step(batch)}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Slow(Callback):
    def on_step(self):
        time.sleep(0.1)
---
Trainer(max_epochs=2, log_every=1, plugins=[Slow()]).fit(Net(), torch.ones(8, 2), torch.ones(4, 2), batch_size=1).steps
---
Trainer(max_epochs=2).plan(Net(), torch.ones(8, 2), batch_size=1)
"""


@pytest.fixture(scope="module")
def ran() -> tuple[list[Any], list[str]]:
    """The cells with their outputs, and what the bar was replaced by."""
    notebook: Any = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in CELLS.split("---")])
    updates: list[str] = []

    class Client(nbclient.NotebookClient):  # type: ignore[misc]
        def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
            if msg["msg_type"] == "update_display_data":
                updates.append(msg["content"]["data"]["text/plain"])
            return super().process_message(msg, cell, cell_index)

    Client(notebook, timeout=240, kernel_name="python3").execute()
    return notebook.cells, updates


def test_a_notebook_shows_one_bar(ran: tuple[list[Any], list[str]]) -> None:
    cells, updates = ran
    outputs = cells[1].outputs
    bars = [output for output in outputs if "text/html" in output.get("data", {})]
    assert len(bars) == 1
    assert bars[0].data["text/html"].startswith('<progress value="16" max="16"></progress> <code>step 16/16  loss ')
    assert bars[0].data["text/plain"].startswith("step 16/16  loss ")
    assert len(updates) >= 3
    steps = {int(line.removeprefix("step ").partition("/")[0]) for line in updates if line.startswith("step ")}
    assert steps & set(range(1, 16)), "on a busy machine the bar skips steps"
    text = "".join(output.text for output in outputs if output.output_type == "stream")
    assert text.count("val_loss") == 2
    assert "steps/s" not in text, "no plain lines beside the bar"


def test_a_notebook_shows_the_text_of_a_plan(ran: tuple[list[Any], list[str]]) -> None:
    cells, _ = ran
    (shown,) = cells[2].outputs
    assert shown.data["text/plain"].startswith("fabricate plan\n")
