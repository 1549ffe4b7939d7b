"""How this process was started, what its launcher was told, and how to start one per rank.

Owns the variables that torchrun, `accelerate launch`, `srun` and `fabricate run` leave behind, Accelerate's YAML and
DeepSpeed's JSON files, and what is handed to `fabricate.cli.runner`, which starts the script. It must not know plugins,
devices or the loop, and imports no torch.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fabricate import launch_fsdp
from fabricate.errors import ConfigurationError, RankError, did_you_mean

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")
_PRECISIONS = ("no", "fp16", "bf16", "fp8")
_MPI = ("OMPI_COMM_WORLD", "PMI", "MV2_COMM_WORLD")
PREEMPTED_FILE = "FABRICATE_PREEMPTED_FILE"
"""The variable that names the file by which a fit tells `fabricate.cli.runner`, its launcher, that it was told to end."""
_FIRST_INTERNAL_STEP = 0xFFFFFFF0  # SLURM numbers its batch, interactive and extern steps from here: one process each
_HOW_TO_START = (
    "`fabricate run script.py --nproc N`, `torchrun --nproc-per-node N script.py` or "
    "`accelerate launch --multi_gpu --num_processes N script.py` (on a CPU as well)"
)


@dataclass(frozen=True)
class Launch:
    """Who started this process, and its place among the ranks.

    `environment` is what torch needs and the launcher did not set: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT under `srun`, nothing otherwise. Whoever opens the process group sets it for that long.
    """

    launcher: Literal["python", "torchrun", "accelerate", "fabricate", "slurm", "other"]
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node_rank: int = 0
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """A setting that the launcher was told: its value as text, and the variable that it came in."""

    value: str
    source: str


def detect(environ: Mapping[str, str]) -> Launch:
    """The launch that `environ` tells of; every rank calls it with its own.

    Raises RankError where ranks were asked for and not started, or would not know of each other.

        detect(os.environ).world_size
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _ranked(environ, _launcher(environ))
    slurm = _is_slurm_task(environ)
    for prefix in _MPI:
        size = environ.get(f"{prefix}_SIZE", "1")
        # `srun --mpi=pmi2` exports PMI_* as well; the numbers then agree with SLURM's.
        same = slurm and (environ.get(f"{prefix}_RANK"), size) == (environ["SLURM_PROCID"], _slurm_tasks(environ))
        if size not in ("0", "1") and not same:
            raise RankError(
                f"mpirun started {size} processes ({prefix}_SIZE={size}) without RANK and WORLD_SIZE, so each would "
                f"train alone; start them with `srun`, {_HOW_TO_START}"
            )
    if slurm:
        return _slurm(environ)
    launcher = _launcher(environ)
    if launcher == "accelerate" and "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        raise RankError(
            "accelerate launch was asked for several processes and started one (MASTER_ADDR and MASTER_PORT are set, "
            "RANK is not): without --multi_gpu, --use_fsdp or --use_deepspeed it never starts more. Start them with "
            f"{_HOW_TO_START}; if you want one, use --num_processes 1 and unset MASTER_ADDR and MASTER_PORT"
        )
    return Launch("python" if launcher == "other" else launcher)


def _launcher(environ: Mapping[str, str]) -> Literal["fabricate", "accelerate", "torchrun", "other"]:
    if environ.get("FABRICATE_LAUNCHED") == "1":
        return "fabricate"
    if "ACCELERATE_MIXED_PRECISION" in environ:
        return "accelerate"
    return "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "other"


def _ranked(environ: Mapping[str, str], launcher: Literal["fabricate", "accelerate", "torchrun", "other"]) -> Launch:
    """The place that RANK, WORLD_SIZE and their companions give."""
    rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE", least=1)
    if rank >= world_size:
        raise RankError(f"RANK={rank} with WORLD_SIZE={world_size}: ranks count from 0 to {world_size - 1}")
    if world_size > 1:
        missing = [name for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in environ]
        if missing:
            raise RankError(
                f"WORLD_SIZE={world_size} without {' and '.join(missing)}: no rank can find the others and its device; "
                f"export what is missing, or start with {_HOW_TO_START}"
            )
    local_rank = _number(environ, "LOCAL_RANK", default=0)
    local_world_size = _number(environ, "LOCAL_WORLD_SIZE", default=world_size, least=1)
    if local_rank >= local_world_size:
        raise RankError(f"LOCAL_RANK={local_rank} with LOCAL_WORLD_SIZE={local_world_size}: local ranks count from 0")
    node_rank = _number(environ, "GROUP_RANK", default=(rank - local_rank) // local_world_size)
    return Launch(launcher, rank, local_rank, world_size, local_world_size, node_rank)


def _number(environ: Mapping[str, str], name: str, *, default: int | None = None, least: int = 0) -> int:
    text = environ.get(name)
    if text is None:
        if default is None:
            raise RankError(f"{name} is not set although other variables of a rank are; start with {_HOW_TO_START}")
        return default
    if not text.isdecimal() or int(text) < least:
        raise RankError(f"{name}={text!r} is not a whole number from {least} up; start with {_HOW_TO_START}")
    return int(text)


def _is_slurm_task(environ: Mapping[str, str]) -> bool:
    """One of several tasks of an `srun`; a batch script or an interactive shell inside an allocation is not."""
    return (
        "SLURM_PROCID" in environ
        and environ.get("SLURM_STEP_ID", "").isdecimal()
        and int(environ["SLURM_STEP_ID"]) < _FIRST_INTERNAL_STEP
        and _slurm_tasks(environ) not in ("0", "1")
    )


def _slurm_tasks(environ: Mapping[str, str]) -> str:
    """The tasks of this step; the allocation may have room for more."""
    return environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS") or "1"


def _slurm(environ: Mapping[str, str]) -> Launch:
    node_rank = _number(environ, "SLURM_NODEID", default=0)
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or ""
    if not nodes and "MASTER_ADDR" not in environ:
        raise RankError(
            "srun: neither SLURM_STEP_NODELIST nor SLURM_NODELIST is set; export MASTER_ADDR, the host of rank 0"
        )
    # One port per job and step, below the range from which the system hands out ports.
    port = 10_000 + (_number(environ, "SLURM_JOB_ID") * 31 + _number(environ, "SLURM_STEP_ID")) % 20_000
    variables = {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": _slurm_tasks(environ),
        "LOCAL_RANK": environ.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": _tasks_on(environ, node_rank),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or _first_host(nodes),
        "MASTER_PORT": environ.get("MASTER_PORT") or str(port),
    }
    place = _ranked({**variables, "GROUP_RANK": str(node_rank)}, "other")
    return Launch(
        "slurm", place.rank, place.local_rank, place.world_size, place.local_world_size, place.node_rank, variables
    )


def _first_host(nodes: str) -> str:
    """The first of SLURM's compressed host names: node003 of "node[003-005,7],login"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first.group()) if first else nodes


def _tasks_on(environ: Mapping[str, str], node_rank: int) -> str:
    """The tasks of one node: "4(x2),3" means 4, 4 and 3."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or _slurm_tasks(environ)
    counts: list[str] = []
    for part in text.split(","):
        count, _, times = part.rstrip(")").partition("(x")
        counts += [count] * int(times or 1)
    if node_rank >= len(counts):
        raise RankError(f"SLURM_NODEID={node_rank}, and the tasks per node {text!r} are those of {len(counts)} nodes")
    return counts[node_rank]


def requests(environ: Mapping[str, str]) -> dict[str, Request]:
    """What the launcher was told about the settings that it knows.

    Keys, those that were set: strategy, precision, gradient_accumulation_steps, max_grad_norm, cpu, plugins, plan_only.
    Values are text, written as for `fabricate run`: a name with options, a number, names joined by commas, "true". What
    `accelerate launch` exports without being asked (precision "no", one accumulation step) is not a request.

    Raises ConfigurationError for a value that cannot be read, and for two that differ.

        requests({"ACCELERATE_MIXED_PRECISION": "BF16"}) == {"precision": Request("bf16", "ACCELERATE_MIXED_PRECISION")}
    """
    accelerate = {
        "strategy": _accelerate_strategy(environ),
        "precision": _accelerate_precision(environ),
        "gradient_accumulation_steps": _accelerate_number(environ, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", int, "1"),
        "max_grad_norm": _accelerate_number(environ, "ACCELERATE_GRADIENT_CLIPPING", float, "none"),
        "cpu": _flag(environ, "ACCELERATE_USE_CPU"),
    }
    fabricate = {
        "strategy": _text(environ, "FABRICATE_STRATEGY"),
        "precision": _text(environ, "FABRICATE_PRECISION"),
        "plugins": _text(environ, "FABRICATE_PLUGINS"),
        "plan_only": _flag(environ, "FABRICATE_PLAN_ONLY"),
    }
    told = {name: request for name, request in accelerate.items() if request}
    for name, ours in fabricate.items():
        if not ours:
            continue
        theirs = told.setdefault(name, ours)
        if ours.value != theirs.value:
            raise ConfigurationError(
                f"{name}: {ours.source} says {ours.value!r} and {theirs.source} says {theirs.value!r}; set one of them"
            )
        told[name] = ours
    return told


def _text(environ: Mapping[str, str], name: str) -> Request | None:
    value = environ.get(name, "").strip()
    return Request(value, name) if value else None


def _flag(environ: Mapping[str, str], name: str) -> Request | None:
    value = environ.get(name, "").strip().lower()
    if value not in _TRUE + _FALSE:
        raise ConfigurationError(f"{name}={environ[name]!r} is neither true nor false; set it to true or unset it")
    return Request("true", name) if value in _TRUE else None


def _accelerate_precision(environ: Mapping[str, str]) -> Request | None:
    name = "ACCELERATE_MIXED_PRECISION"
    value = environ.get(name, "no").strip().lower()
    if value not in _PRECISIONS:
        known = f"{', '.join(_PRECISIONS)}{did_you_mean(value, _PRECISIONS)}"
        raise ConfigurationError(f"{name}={environ[name]!r} is not one of {known}")
    return Request(value, name) if value != "no" else None


def _accelerate_number(
    environ: Mapping[str, str], name: str, kind: type[int] | type[float], default: str
) -> Request | None:
    value = environ.get(name, "").strip().lower()
    if value in ("", "auto", default):
        return None
    try:
        valid = kind(value) > 0
    except ValueError:
        valid = False
    if not valid:
        wanted = "positive whole number" if kind is int else "positive number"
        raise ConfigurationError(f"{name}={environ[name]!r} is not a {wanted}; correct it or unset it")
    return Request(value, name)


def _accelerate_strategy(environ: Mapping[str, str]) -> Request | None:
    fsdp, deepspeed = _flag(environ, "ACCELERATE_USE_FSDP"), _flag(environ, "ACCELERATE_USE_DEEPSPEED")
    if fsdp and deepspeed:
        raise ConfigurationError("ACCELERATE_USE_FSDP and ACCELERATE_USE_DEEPSPEED are both true; unset one of them")
    if fsdp:
        options = launch_fsdp.fsdp_options(environ)
        return Request(_with_options("fsdp", options), fsdp.source)
    if not deepspeed:
        return None
    file = _text(environ, "ACCELERATE_DEEPSPEED_CONFIG_FILE")
    if file:  # Accelerate reads every option from the file then, and none from its own variables
        return Request(_deepspeed_strategy(file.value, _read(file.value)), file.source)
    stage = environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")  # Accelerate's own default
    options = {}
    for option in ("offload_optimizer", "offload_param"):
        device = _text(environ, f"ACCELERATE_DEEPSPEED_{option.upper()}_DEVICE")
        if device and device.value != "none":
            options[option] = device.value
    return Request(_with_options(_zero("ACCELERATE_DEEPSPEED_ZERO_STAGE", stage), options), deepspeed.source)


def _zero(source: str, stage: object) -> str:
    if str(stage) not in ("0", "1", "2", "3"):
        raise ConfigurationError(f"{source}: stage {stage!r} is not one of 0, 1, 2, 3")
    return f"zero{stage}"


def _with_options(name: str, options: Mapping[str, str]) -> str:
    for option, value in options.items():
        if "," in value:
            raise ConfigurationError(
                f"{name}: {option}={value!r} holds a comma, which separates options; rename the file"
            )
    return name + (":" + ",".join(f"{key}={value}" for key, value in options.items()) if options else "")


@dataclass(frozen=True)
class ConfigFile:
    """What an Accelerate YAML or a DeepSpeed JSON asks for; None is unset.

    `num_processes` counts the ranks of all nodes. `variables` are for the script's environment. `unused` names settings
    that shape how Accelerate's own wrappers work and mean nothing here.
    """

    path: str
    strategy: str | None = None
    precision: str | None = None
    num_processes: int | None = None
    num_nodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    variables: dict[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()


def read_config(path: str) -> ConfigFile:
    """Read an Accelerate YAML or a DeepSpeed JSON, told apart by what is in it.

    Raises ConfigurationError for a file that is neither, and for a setting in it that fabricate cannot honour.

        read_config("zero3.json").strategy == "zero3:config=zero3.json"
    """
    content = _read(path)
    if "distributed_type" in content or "compute_environment" in content:
        return _accelerate_file(path, content)
    return ConfigFile(path, strategy=_deepspeed_strategy(path, content))


def _read(path: str) -> dict[str, Any]:
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


def _deepspeed_strategy(path: str, content: Mapping[str, Any]) -> str:
    zero = content.get("zero_optimization")
    if not isinstance(zero, dict) or "stage" not in zero:
        raise ConfigurationError(
            f"config file {path!r} is not understood: an Accelerate YAML sets distributed_type, a DeepSpeed JSON sets "
            f"zero_optimization.stage; it sets {', '.join(map(str, content)) or 'nothing'}"
        )
    return _with_options(_zero(f"config file {path!r}: zero_optimization", zero["stage"]), {"config": path})


# Keys of an Accelerate YAML that ask for nothing here: torchrun's rendezvous replaces them.
_NEUTRAL_KEYS = ("main_training_function", "rdzv_backend", "same_network")
# Keys that travel as the variable that `accelerate launch` makes of them.
_VARIABLES = {
    "mixed_precision": "ACCELERATE_MIXED_PRECISION",
    "use_cpu": "ACCELERATE_USE_CPU",
    "debug": "ACCELERATE_DEBUG_MODE",
    "gpu_ids": "CUDA_VISIBLE_DEVICES",
    "deepspeed_config.deepspeed_config_file": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
    "deepspeed_config.gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "deepspeed_config.gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "deepspeed_config.offload_optimizer_device": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "deepspeed_config.offload_param_device": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "deepspeed_config.zero_stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    **launch_fsdp.VARIABLES,
}
# Those that reach the ranks as they are; the others become the strategy and the precision.
_PASSED_ON = (
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "ACCELERATE_GRADIENT_CLIPPING",
    "ACCELERATE_USE_CPU",
    "ACCELERATE_DEBUG_MODE",
    "CUDA_VISIBLE_DEVICES",
)
_TYPES: dict[str, dict[str, str]] = {
    "NO": {},
    "MULTI_CPU": {"ACCELERATE_USE_CPU": "true"},
    "MULTI_GPU": {},
    "FSDP": {"ACCELERATE_USE_FSDP": "true"},
    "DEEPSPEED": {"ACCELERATE_USE_DEEPSPEED": "true"},
}


def _accelerate_file(path: str, content: dict[str, Any]) -> ConfigFile:
    """An Accelerate YAML, through the variables that `accelerate launch` would export for it."""
    where = f"config file {path!r}"
    kind = str(content.pop("distributed_type", None) or "NO").upper()  # an unquoted NO is false to YAML
    if kind not in _TYPES:
        raise ConfigurationError(f"{where}: distributed_type {kind} is not one of {', '.join(_TYPES)}")
    place = content.pop("compute_environment", "LOCAL_MACHINE")
    if place != "LOCAL_MACHINE":
        raise ConfigurationError(f"{where}: compute_environment {place}: `fabricate run` starts on LOCAL_MACHINE only")
    num_processes = _count(where, content, "num_processes")
    num_nodes = _count(where, content, "num_machines")
    node_rank = _count(where, content, "machine_rank")
    master_port = _count(where, content, "main_process_port")
    master_addr = content.pop("main_process_ip", None)
    if kind == "NO" and (num_processes or 1) > 1:
        raise ConfigurationError(
            f"{where}: num_processes is {num_processes}, and distributed_type NO runs one; use MULTI_GPU or MULTI_CPU"
        )
    variables, unused = dict(_TYPES[kind]), []
    for key, value in _flat(content).items():
        section = key.partition(".")[0]
        if section in ("fsdp_config", "deepspeed_config") and section != f"{kind.lower()}_config":
            raise ConfigurationError(f"{where}: {key} is set, and distributed_type is {kind}; remove one of them")
        if key in _VARIABLES:
            variables[_VARIABLES[key]] = str(value)
        elif section == "deepspeed_config" or key in launch_fsdp.MEANINGLESS:
            unused.append(key)
        elif key not in _NEUTRAL_KEYS:
            raise ConfigurationError(f"{where}: {key} ({value!r}) cannot be passed on by `fabricate run`; remove it")
    if variables.get("CUDA_VISIBLE_DEVICES") == "all":
        del variables["CUDA_VISIBLE_DEVICES"]
    told = requests(variables)
    return ConfigFile(
        path,
        strategy=told["strategy"].value if "strategy" in told else None,
        precision=told["precision"].value if "precision" in told else None,
        num_processes=num_processes,
        # One machine and rank 0 are what `accelerate config` writes unasked.
        num_nodes=None if num_nodes == 1 else num_nodes,
        node_rank=node_rank or None,
        master_addr=str(master_addr) if master_addr else None,
        master_port=master_port,
        variables={name: variables[name] for name in _PASSED_ON if name in variables},
        unused=tuple(unused),
    )


def _flat(content: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that ask for something, sections as "section.key"."""
    flat: dict[str, Any] = {}
    for key, value in content.items():
        section = value if isinstance(value, dict) else None
        flat.update(
            {key: value} if section is None else {f"{key}.{name}": setting for name, setting in section.items()}
        )
    return {
        key: value
        for key, value in flat.items()
        if key == "fsdp_config.fsdp_reshard_after_forward"
        or (value and str(value).lower() not in ("no", "none", "false"))
    }


def _count(where: str, content: dict[str, Any], key: str) -> int | None:
    value = content.pop(key, None)
    if value is None or value == -1:  # -1: Accelerate's word for "given on the command line"
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigurationError(f"{where}: {key} {value!r} is not a whole number")
    return value


def tell_preempted(environ: Mapping[str, str], by: str) -> None:
    """Leave `by`, the signal that ended a fit, where `fabricate.cli.runner` finds it; empty: the last fit was not told to end.

    Nothing happens under other launchers. One process of each node calls it.
    """
    if file := environ.get(PREEMPTED_FILE):
        Path(file).unlink(missing_ok=True)
        if by:
            Path(file).write_text(by)


def command(
    script: str,
    arguments: Sequence[str],
    *,
    nproc: int,
    nnodes: int = 1,
    node_rank: int = 0,
    master_addr: str | None = None,
    master_port: int | None = None,
    python: str = sys.executable,
) -> list[str]:
    """The command line that runs `script` on `nproc` ranks of this node: in one process for one in all, else through torchrun.

    Raises ConfigurationError for counts that cannot be, and for several nodes without the address of the first.

        command("train.py", ["--lr", "0.1"], nproc=1)[2:] == ["fabricate.cli.runner", "--alone", "--", "train.py", "--lr", "0.1"]
    """
    if nproc < 1 or nnodes < 1:
        raise ConfigurationError(f"--nproc {nproc} --nnodes {nnodes}: a run has one process on one node at least")
    if not 0 <= node_rank < nnodes:
        raise ConfigurationError(f"--node-rank {node_rank} --nnodes {nnodes}: node ranks count from 0 to {nnodes - 1}")
    if nnodes > 1 and master_addr is None:
        raise ConfigurationError(
            f"--nnodes {nnodes} without --master-addr: give the host of node rank 0, the same everywhere"
        )
    if nproc == nnodes == 1:
        return [python, "-m", "fabricate.cli.runner", "--alone", "--", script, *arguments]
    if nnodes == 1 and master_addr is None and master_port is None:
        meeting = ["--standalone"]
    else:
        meeting = ["--nnodes", str(nnodes), "--node-rank", str(node_rank)]
        meeting += ["--master-addr", master_addr or "127.0.0.1", "--master-port", str(master_port or 29500)]
    # Without "--" torchrun takes an argument of the script for an abbreviation of its own: "ambiguous option: --log".
    return [python, "-m", "fabricate.cli.runner", *meeting, "--nproc-per-node", str(nproc), "--", script, *arguments]


def listed_plugins(text: str) -> list[str]:
    """The plugins in a value of FABRICATE_PLUGINS: ";" is between plugins, "," between the options of one.

    listed_plugins("ema:decay=0.9,start=10; no:wandb") == ["ema:decay=0.9,start=10", "no:wandb"]
    """
    found = [plugin.strip() for plugin in text.split(";") if plugin.strip()]
    for plugin in found:
        name, comma, _ = plugin.partition(",")
        if comma and ":" not in name.removeprefix("no:"):
            raise ConfigurationError(
                f"plugins: {plugin!r} is no name; put ; between plugins (FABRICATE_PLUGINS='ema:decay=0.9,start=10;wandb'), or "
                "repeat --plugin"
            )
    return found


def environment(
    base: Mapping[str, str],
    *,
    nproc: int = 1,
    strategy: str | None = None,
    precision: str | None = None,
    plugins: Sequence[str] = (),
    plan_only: bool = False,
    variables: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """`base` plus the variables that carry these settings to the ranks; `base` itself stays as it is.

    Plugins add to those in `base`. Raises ConfigurationError where `base` already holds another value.

        environment(os.environ, strategy="zero3")["FABRICATE_STRATEGY"] == "zero3"
    """
    for plugin in plugins:
        if ";" in plugin or len(listed_plugins(plugin)) != 1:
            raise ConfigurationError(f"--plugin {plugin!r}: give one plugin and repeat --plugin for each of them")
    wanted = {"FABRICATE_STRATEGY": strategy, "FABRICATE_PRECISION": precision, **(variables or {})}
    result = dict(base)
    for name, value in wanted.items():
        if value is None:
            continue
        if base.get(name, value) != value:
            raise ConfigurationError(
                f"{name}: the environment says {base[name]!r}, this command {value!r}; unset one of them"
            )
        result[name] = value
    if plugins:
        listed = listed_plugins(base.get("FABRICATE_PLUGINS", ""))
        result["FABRICATE_PLUGINS"] = ";".join(dict.fromkeys([*listed, *plugins]))
    if plan_only:
        result["FABRICATE_PLAN_ONLY"] = "1"
    result["FABRICATE_LAUNCHED"] = "1"
    # A store shared between the rendezvous and the process group keeps the keys of the ranks before a restart.
    result["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if nproc > 1:  # one process keeps torch's own choice, as under plain Python
        result.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // nproc)))
    return result
