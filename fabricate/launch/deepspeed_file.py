"""The content of settings files, and the strategy for a DeepSpeed JSON.

Must not know launchers, Accelerate's files, or the other keys of a DeepSpeed JSON, which its strategy reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fabricate.errors import ConfigurationError


def read_file(path: str) -> dict[str, Any]:
    """The settings in a YAML or JSON file."""
    import yaml  # type: ignore[import-untyped]

    try:
        text = Path(path).read_text(encoding="utf-8")
        # YAML reads 1e8 as text, so what looks like JSON is read as JSON.
        if text.lstrip().startswith("{"):
            content = json.loads(text, object_pairs_hook=_unique)
        else:
            content = yaml.safe_load(text)
            _check_keys(yaml.compose(text, yaml.SafeLoader))
    except OSError as exc:
        raise ConfigurationError(
            f"config file {path!r} cannot be read: {exc.strerror}; give the path of a file"
        ) from exc
    except (ValueError, yaml.YAMLError) as exc:
        raise ConfigurationError(f"config file {path!r} is not valid YAML or JSON: {exc}") from exc
    if not isinstance(content, dict):
        raise ConfigurationError(f"config file {path!r} holds no settings; give an Accelerate YAML or a DeepSpeed JSON")
    return content


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The mapping of `pairs`. Raises ValueError if a key occurs twice, for which YAML and JSON silently take the last value."""
    names = [name for name, _ in pairs]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"{twice[0]} is set twice. Remove one of the two")
    return dict(pairs)


def _check_keys(node: Any) -> None:
    """Raise ValueError if a mapping in `node`, composed by PyYAML, has a key twice."""
    if node is not None and node.id == "mapping":
        _unique([(name.value, value) for name, value in node.value if name.id == "scalar"])
        for _, value in node.value:
            _check_keys(value)


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
