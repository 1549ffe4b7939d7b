"""The content of settings files, and the strategy for a DeepSpeed JSON.

Must not know launchers, Accelerate's files, or the other keys of a DeepSpeed JSON, which its strategy reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fabricate.errors import ConfigurationError


def read_file(path: str) -> dict[str, Any]:
    """The settings in a YAML or JSON file."""
    import yaml  # type: ignore[import-untyped]

    try:
        text = Path(path).read_text(encoding="utf-8")
        # YAML reads 1e8 as text, so what looks like JSON is read as JSON.
        content = json.loads(text) if text.lstrip().startswith("{") else yaml.safe_load(text)
    except OSError as exc:
        raise ConfigurationError(
            f"config file {path!r} cannot be read: {exc.strerror}; give the path of a file"
        ) from exc
    except (ValueError, yaml.YAMLError) as exc:
        raise ConfigurationError(f"config file {path!r} is neither YAML nor JSON: {exc}") from exc
    if not isinstance(content, dict):
        raise ConfigurationError(f"config file {path!r} holds no settings; give an Accelerate YAML or a DeepSpeed JSON")
    return content


def deepspeed_strategy(path: str, content: Mapping[str, Any]) -> str:
    """The strategy for the DeepSpeed JSON at `path`."""
    zero = content.get("zero_optimization")
    if not isinstance(zero, dict) or "stage" not in zero:
        raise ConfigurationError(
            f"config file {path!r} sets neither distributed_type (an Accelerate YAML) nor zero_optimization.stage (a DeepSpeed "
            f"JSON); give a file that sets one of them. This one sets {', '.join(map(str, content)) or 'nothing'}. A file of the "
            "Trainer's arguments has to end in .yaml"
        )
    return with_options(zero_strategy(f"config file {path!r}: zero_optimization", zero["stage"]), {"config": path})


def zero_strategy(source: str, stage: object) -> str:
    """The strategy for a ZeRO stage. `source`: the name of the setting in errors."""
    if str(stage) not in ("0", "1", "2", "3"):
        raise ConfigurationError(f"{source}: stage {stage!r} is not one of 0, 1, 2, 3")
    return f"zero{stage}"


def with_options(name: str, options: Mapping[str, str]) -> str:
    """A strategy's name and its options in one text. Raises ConfigurationError for a value with a comma, which separates options."""
    for option, value in options.items():
        if "," in value:
            raise ConfigurationError(
                f"{name}: {option}={value!r} holds a comma, which separates options; rename the file"
            )
    return name + (":" + ",".join(f"{key}={value}" for key, value in options.items()) if options else "")
