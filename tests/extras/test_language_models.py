"""The language model examples, run as by a user, in separate processes, with fewer steps, and checked by their results."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*command: str, directory: Path, hushed: bool = True) -> str:
    """What `python COMMAND` printed; without the network, on the CPU, one thread per process. hushed: libraries print no warning."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.run(
        [sys.executable, *command], cwd=directory, env=environment, capture_output=True, text=True, timeout=600
    )
    assert process.returncode == 0, (
        f"{command} ended with {process.returncode}\n{process.stdout[-2000:]}\n{process.stderr[-4000:]}"
    )
    assert not hushed or re.findall(r".*(?:warning|failed to load).*", process.stderr, re.IGNORECASE) == []
    return process.stdout


def metrics(run_dir: Path, stage: str, name: str) -> dict[int, float]:
    """A metric's values by step, from metrics.jsonl."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["metrics"][name] for line in lines if line["stage"] == stage}


def test_the_demo_stops_resumes_and_is_read_without_fabricate(tmp_path: Path) -> None:
    demo = str(EXAMPLES / "demo.py")
    options = ("--run-dir", "here", "--max-steps", "16", "--every", "8 steps", "--stop-at", "8")
    launch = ("-m", "fabricate", "run", demo, "--nproc", "2", "--", *options)
    here = tmp_path / "here"

    first = run(*launch, directory=tmp_path)
    assert "ended at step 8 (--stop-at 8)" in first
    assert list(metrics(here, "validate", "val_loss")) == [0, 8]

    second = run(*launch, directory=tmp_path)
    assert "resumed from here/checkpoints/step-00000008" in second
    assert "ended at step 16 (max_steps)" in second
    losses = metrics(here, "validate", "val_loss")
    assert list(losses) == [0, 8, 16]
    assert losses[0] > 6.8 > losses[8] > losses[16]  # log(1024) is 6.9: nothing learnt
    assert (here / "loss.png").read_bytes().startswith(b"\x89PNG")

    # generate.py imports transformers only and fails if fabricate came along.
    output = run(str(EXAMPLES / "generate.py"), "here/model", directory=tmp_path)
    assert "here/model read by transformers alone:\ndef __init__(self" in output
    sample = output.partition("def __init__(self")[2]
    assert len(sample) > 40
    assert sample.strip() in second  # the same weights and tokenizer as the run's own sample

    # Fine-tuning from that folder, on a text file, in one process.
    (tmp_path / "rhyme.txt").write_text("".join(f"{n} green bottles, hanging on the wall\n" for n in range(400)))
    options = ("--model", "here/model", "--dataset", "rhyme.txt", "--run-dir", "tuned", "--max-steps", "10")
    run(demo, *options, "--every", "10 steps", directory=tmp_path)
    losses = metrics(tmp_path / "tuned", "validate", "val_loss")
    assert losses[10] < losses[0] - 1


def test_a_llama_in_shards_learns_the_same_under_zero3_and_fsdp(tmp_path: Path) -> None:
    """The whole model is initialised from seed and names, whatever cuts it."""
    (tmp_path / "rhyme.txt").write_text("".join(f"{n} green bottles, hanging on the wall\n" for n in range(400)))
    losses = []
    for strategy in ("zero3", "fsdp"):
        options = ("--dataset", "rhyme.txt", "--run-dir", strategy, "--max-steps", "6", "--global-batch-size", "16")
        launch = ("-m", "fabricate", "run", str(EXAMPLES / "llama.py"), "--nproc", "2", "--strategy", strategy)
        printed = run(*launch, "--", *options, "--batch-size", "4", directory=tmp_path, hushed=False)
        match = re.search(r"step 6: validation loss (\d+\.\d+)", printed)
        assert match is not None
        assert printed.count("validation loss") == 1, "rank 0 alone prints"
        losses.append(float(match[1]))
        assert (tmp_path / strategy / "model" / "config.json").exists()
    assert abs(losses[0] - losses[1]) < 1e-4 * losses[0]
