"""Generates text with an exported RUN_DIR/model/, using transformers alone; fabricate is neither needed nor imported.

python examples/generate.py runs/demo/model --prompt "import "
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

PROMPT = "def __init__(self"


def hush_libraries() -> None:
    """Turn off progress bars, and warnings about optional libraries of transformers that this example does not use."""
    disable_progress_bar()
    for name in ("torchao", "bitsandbytes", "torch.utils._pytree", "DeepSpeed"):
        logging.getLogger(name).setLevel(logging.ERROR)
        logging.getLogger(name).addFilter(
            lambda record: record.levelno >= logging.ERROR
        )  # DeepSpeed sets its level itself


def sample(folder: Path, prompt: str = PROMPT, tokens: int = 80) -> str:
    """`prompt` with the continuation by the model in `folder`; the same text each time."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        ids = model.generate(
            **tokenizer(prompt, return_tensors="pt"),
            max_new_tokens=tokens,
            do_sample=True,
            temperature=0.7,
            top_k=40,
            pad_token_id=tokenizer.eos_token_id,
        )
    return tokenizer.decode(ids[0], skip_special_tokens=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompt", default=PROMPT)
    options = parser.parse_args()
    hush_libraries()
    text = sample(options.folder, options.prompt)
    if "fabricate" in sys.modules:
        raise SystemExit("fabricate was imported")
    print(f"{options.folder} read by transformers alone:\n{text}")


if __name__ == "__main__":
    main()
