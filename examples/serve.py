"""A page in the browser for a trained model, with Gradio: a language model continues a text, a classifier shows the labels.

python examples/serve.py runs/demo/model
python examples/serve.py user/name --port 7861

It reads the folder with transformers alone; fabricate is not needed. Nothing leaves this machine: no analytics, no shared link.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when gradio is imported
import gradio
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer


def chat(model: Any, tokenizer: Any, tokens: int) -> gradio.Blocks:
    """A page that shows the model's answer to the conversation so far, with the tokenizer's chat template if it has one."""

    def answer(message: str, history: list[dict[str, Any]]) -> str:
        if tokenizer.chat_template:
            turns = [{"role": turn["role"], "content": _text(turn["content"])} for turn in history]
            turns.append({"role": "user", "content": message})
            options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
            inputs = tokenizer.apply_chat_template(turns, **options)
        else:
            inputs = tokenizer(message, return_tensors="pt")
        inputs = inputs.to(model.device)
        with torch.inference_mode():
            output = model.generate(**inputs, max_new_tokens=tokens, pad_token_id=tokenizer.eos_token_id)
        return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))

    return gradio.ChatInterface(answer, title="Chat")


def _text(content: Any) -> str:
    """The text of a turn, which Gradio may give as a list of parts."""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def classify(model: Any, tokenizer: Any) -> gradio.Blocks:
    """A page that shows the probability of each label."""

    def answer(text: str) -> dict[str, float]:
        with torch.inference_mode():
            scores = model(**tokenizer(text, return_tensors="pt", truncation=True).to(model.device)).logits[0]
        return {model.config.id2label[n]: float(p) for n, p in enumerate(scores.float().softmax(0))}

    text, label = gradio.Textbox(label="Text"), gradio.Label(label="Label")
    return gradio.Interface(answer, text, label, title="Classifier", flagging_mode="never")


def page(folder: str, tokens: int = 80) -> gradio.Blocks:
    """The page for the model in `folder` (or of that name on the hub); its config.json determines the kind."""
    architecture = next(iter(AutoConfig.from_pretrained(folder).architectures or ()), "")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    if architecture.endswith("ForSequenceClassification"):
        return classify(AutoModelForSequenceClassification.from_pretrained(folder).to(device).eval(), tokenizer)
    if architecture.endswith(("ForCausalLM", "LMHeadModel")):
        return chat(AutoModelForCausalLM.from_pretrained(folder).to(device).eval(), tokenizer, tokens)
    raise SystemExit(
        f"{folder}: this example knows ...ForCausalLM and ...ForSequenceClassification, not {architecture!r}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="RUN_DIR/model, or a model of the hub")
    parser.add_argument("--port", type=int, default=7860)
    parser.add_argument("--tokens", type=int, default=80, help="how much a language model writes")
    options = parser.parse_args()
    page(options.folder, options.tokens).launch(server_name="127.0.0.1", server_port=options.port, share=False)


if __name__ == "__main__":
    main()
