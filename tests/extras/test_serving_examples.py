"""The examples that serve or export a trained model: a page of Gradio in headless Chromium, and ONNX with onnxruntime's numbers."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

from fabricate import Trainer, TrainModule
from tests.support.scripts import run_script

pytest.importorskip("gradio", reason="gradio is not installed: tests/extras/requirements.txt has it")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: tests/extras/requirements.txt has it")
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
EXAMPLES = Path(__file__).parents[2] / "examples"
WORDS = ("<pad>", "<end>", "good", "bad", "film")
SIZES = {"vocab_size": len(WORDS), "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"input_ids", "attention_mask"}
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="<pad>", model_input_names=sorted(names)
    )


class Net(TrainModule):
    """A classifier that learns "good" from "bad", or a language model that learns to say "good film"."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokenizer = tokenizer()
        self.model: Any
        if kind == "classifier":
            labels = {"id2label": {0: "GOOD", 1: "BAD"}, "label2id": {"GOOD": 0, "BAD": 1}}
            self.model = BertForSequenceClassification(
                BertConfig(**SIZES, num_attention_heads=2, max_position_embeddings=16, **labels)
            )
        else:
            self.model = LlamaForCausalLM(
                LlamaConfig(**SIZES, num_attention_heads=2, num_key_value_heads=2, eos_token_id=1, pad_token_id=0)
            )

    def training_step(self, batch: Any) -> torch.Tensor:
        ids, labels = batch
        loss: torch.Tensor = self.model(input_ids=ids, labels=labels).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """RUN_DIR/model/ of each kind."""
    folders = {}
    for kind in ("classifier", "language model"):
        run_dir = tmp_path_factory.mktemp("runs") / kind.replace(" ", "-")
        ids = torch.tensor([[2, 4], [3, 4]] * 8) if kind == "classifier" else torch.tensor([[2, 4, 2, 4, 1]] * 16)
        labels = torch.tensor([0, 1] * 8) if kind == "classifier" else ids
        rows = torch.utils.data.TensorDataset(ids, labels)
        Trainer(max_steps=40, run_dir=run_dir, progress=False).fit(Net(kind), rows, batch_size=8)
        folders[kind] = run_dir / "model"
    return folders


@contextmanager
def served(folder: Path, directory: Path) -> Iterator[str]:
    """The address of examples/serve.py over `folder`, once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(EXAMPLES / "serve.py"), str(folder), "--port", str(port), "--tokens", "4"]
    with (directory / "serve.log").open("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=directory)
        try:
            for _ in range(600):
                assert process.poll() is None, (directory / "serve.log").read_text()
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=1).close()
                    break
                except OSError:
                    pass
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}/"
        finally:
            process.terminate()
            process.wait(30)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (apt-get install chromium)")
@pytest.mark.parametrize(
    ("kind", "text", "answer"),
    [("classifier", "bad film", "BAD"), ("language model", "good film good", "film")],
    ids=["classifier", "chat"],
)
def test_a_trained_model_answers_in_the_browser(
    models: dict[str, Path], tmp_path: Path, kind: str, text: str, answer: str
) -> None:
    with served(models[kind], tmp_path) as address, sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        # What is elsewhere (fonts) is not reached.
        page.route(lambda url: not url.startswith(address), lambda route: route.abort())
        page.goto(address)
        page.locator("textarea").first.fill(text)
        if kind == "classifier":
            page.get_by_role("button", name="Submit").click()
            shown = page.locator("h2", has_text=answer)
        else:
            page.locator("textarea").first.press("Enter")
            shown = page.locator(".bot .prose, .bot.message", has_text=answer).last
        shown.wait_for(timeout=30_000)
        browser.close()
    assert faults == []


def test_onnxruntime_computes_what_torch_does(models: dict[str, Path], tmp_path: Path) -> None:
    for arguments in ((), ("--model", str(models["classifier"]))):
        printed = run_script(EXAMPLES / "export_onnx.py", *arguments, "--out", "here.onnx", directory=tmp_path)
        match = re.search(r"here\.onnx: differs from torch by (\S+) at most", printed)
        assert match is not None, printed
        assert float(match[1]) < 1e-4
