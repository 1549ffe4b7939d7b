"""The command line: options on both sides of the script, exit codes, tables, and errors without a traceback."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

import fabricate
from fabricate.checkpoint.format import directory as checkpoint
from fabricate.cli.main import main
from fabricate.testing.ranks import free_port

SCRIPT = """
import os, pathlib, sys, time
names = ("RANK", "WORLD_SIZE", "FABRICATE_STRATEGY", "FABRICATE_PRECISION", "FABRICATE_PLUGINS", "FABRICATE_PLAN_ONLY",
         "ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
variables = {name: os.environ[name] for name in names if name in os.environ}
os.write(1, f"{variables} {sys.argv[1:]}{chr(10)}".encode())
# The first to fail ends the others: each waits until all have said what they were told.
here = pathlib.Path(sys.argv[0]).parent
(here / f"said-{os.environ.get('RANK', 0)}").touch()
while len(list(here.glob("said-*"))) < int(os.environ.get("WORLD_SIZE", "1")):
    time.sleep(0.01)
if "wait" in sys.argv:
    time.sleep(600)
sys.exit(int(os.environ.get("CODE", "0")))
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def _line(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "fabricate", *arguments]


def _run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"OMP_NUM_THREADS": "1"} | environ
    return subprocess.run(_line(*arguments), env=env, capture_output=True, text=True, check=False)


def _invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def _commands(group: click.Group, *names: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, command in group.commands.items():
        yield (*names, name), command
        if isinstance(command, click.Group):
            yield from _commands(command, *names, name)


@pytest.mark.parametrize(("names", "command"), [((), main), *_commands(main)])
def test_every_command_has_help_with_an_example(names: tuple[str, ...], command: click.Command) -> None:
    shown = _invoke(*names, "--help")
    assert shown.exit_code == 0
    assert re.search(rf"Examples?:\n +fabricate {' '.join(names)}", shown.output)


def test_the_summary_of_each_command_is_whole() -> None:
    assert "..." not in _invoke("--help").output.partition("Commands:")[2]


def test_the_version_is_printed() -> None:
    assert _invoke("--version").output == f"fabricate {fabricate.__version__}\n"


def test_importing_it_does_not_import_torch() -> None:
    code = "import sys, fabricate.cli.main; assert not {'torch', 'accelerate', 'rich', 'yaml'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_one_process_runs_in_plain_python(script: str) -> None:
    process = _run("run", script, "--lr", "0.1", "-x", "file", "--strategy", "single", "--key=value")
    assert process.stdout == f"{ {'FABRICATE_STRATEGY': 'single'} } ['--lr', '0.1', '-x', 'file', '--key=value']\n"
    assert (process.returncode, process.stderr) == (0, "")


def test_the_exit_code_is_the_scripts(script: str) -> None:
    assert _run("run", script, CODE="7").returncode == 7


def test_two_processes_run_through_torchrun_with_options_on_both_sides(script: str) -> None:
    options = (
        "--precision",
        "bf16",
        script,
        "--nproc",
        "2",
        "--log",
        "1",
        "--strategy=ddp",
        "--plugin",
        "a",
        "--plugin",
        "b:x=1,y=2",
    )
    process = _run("run", *options, "--", "--nproc", "9", "--", "last", CODE="3")
    variables = {"FABRICATE_STRATEGY": "ddp", "FABRICATE_PRECISION": "bf16", "FABRICATE_PLUGINS": "a;b:x=1,y=2"}
    arguments = ["--log", "1", "--nproc", "9", "--", "last"]
    ranks = [{"RANK": str(rank), "WORLD_SIZE": "2"} | variables for rank in range(2)]
    assert sorted(process.stdout.splitlines()) == [f"{rank} {arguments}" for rank in ranks]
    assert process.returncode == 3
    assert "Traceback" not in process.stderr


def test_an_option_of_the_script_that_fabricate_reads_too_is_an_error_that_says_where_to_put_it(script: str) -> None:
    config = Path(script).with_name("own.yaml")
    config.write_text("model:\n  width: 3\n")
    process = _run("run", script, "--nproc", "2", "--config", str(config))
    assert process.returncode == 2
    assert f"of the script, put it after --: fabricate run {script} -- --config {config}" in process.stderr
    assert _run("run", script, "--", "--config", str(config)).stdout == f"{ {} } ['--config', '{config}']\n"


def test_no_other_program_can_take_the_port_at_which_the_ranks_meet(tmp_path: Path) -> None:
    path = tmp_path / "taken.py"
    path.write_text(
        "import contextlib, os, socket\n"
        "port = int(os.environ['MASTER_PORT'])\n"
        "if os.environ['RANK'] == '0':\n"
        "    other = socket.socket()\n"
        "    with contextlib.suppress(OSError):\n"
        "        other.bind(('', port)), other.listen()\n"
        "import torch\n"
        "from fabricate import Trainer, TrainModule\n"
        "class Module(TrainModule):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(1, 1)\n"
        "    def training_step(self, batch):\n"
        "        return self.layer(batch).square().mean()\n"
        "    def configure_optimizers(self):\n"
        "        return torch.optim.SGD(self.parameters(), lr=0.1)\n"
        "Trainer(max_steps=1, progress=False).fit(Module(), torch.ones(4, 1), batch_size=2)\n"
    )
    process = _run("run", str(path), "--nproc", "2")
    assert process.returncode == 0, process.stderr


def test_two_nodes_find_each_other(script: str) -> None:
    shared = ("run", script, "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    nodes = [
        subprocess.Popen(_line(*shared, "--node-rank", str(rank)), stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    assert [node.communicate()[0] for node in nodes] == [
        f"{ {'RANK': str(rank), 'WORLD_SIZE': '2'} } []\n" for rank in range(2)
    ]
    assert [node.returncode for node in nodes] == [0, 0]


@pytest.mark.parametrize(("nproc", "code"), [("1", -signal.SIGTERM), ("2", 128 + signal.SIGTERM)])
def test_a_signal_reaches_the_script_and_shows_in_the_exit_code(script: str, nproc: str, code: int) -> None:
    line = _line("run", script, "wait", "--nproc", nproc)
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(int(nproc)):
            process.stdout.readline()
        process.terminate()
        errors = process.communicate()[1]
    assert process.returncode == code
    assert "Traceback" not in errors


WRONG = """
import os, pathlib, sys, time
def answer(rank):
    raise ValueError(f"no answer on rank {rank}")
here, rank = pathlib.Path(sys.argv[0]).parent, os.environ["RANK"]
if rank == sys.argv[1]:
    time.sleep(600)
(here / f"there-{rank}").touch()
while len(list(here.glob("there-*"))) < int(sys.argv[2]):
    time.sleep(0.01)
answer(rank)
"""


@pytest.mark.parametrize(("waits", "fail"), [("none", "2"), ("0", "1")], ids=["on both ranks", "on one rank"])
def test_an_error_is_printed_once_and_what_to_know_of_it_last(tmp_path: Path, waits: str, fail: str) -> None:
    for attempt in range(8):  # on a busy machine the launcher may end the other rank before it has said why it fails
        script = tmp_path / str(attempt) / "train.py"  # the ranks meet in this directory, so each attempt needs its own
        script.parent.mkdir()
        script.write_text(WRONG)
        process = _run("run", "--nproc", "2", str(script), waits, fail)
        if waits != "none" or process.stderr.count(" failed: ValueError") == 2:
            break
    assert process.returncode == 1
    assert process.stderr.count("Traceback") == 1
    assert process.stderr.count('    raise ValueError(f"no answer on rank {rank}")') == 1
    assert "runpy" not in process.stderr, "the traceback begins with the script"
    what, where, remedy = process.stderr.splitlines()[-3:]
    assert re.fullmatch(r"rank [01] failed: ValueError: no answer on rank [01]", what)
    assert where.endswith('train.py:4, in answer: raise ValueError(f"no answer on rank {rank}")')
    assert remedy == "correct it and start the same command again"
    first = re.search(r"^rank ([01]):$", process.stderr, re.MULTILINE)
    assert first is not None
    if waits == "none":  # the other rank's in one line
        other = 1 - int(first[1])
        assert f"rank {other} failed: ValueError: no answer on rank {other} (at " in process.stderr


def test_a_rank_that_is_killed_is_named_with_its_signal(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os\nos.kill(os.getpid(), 9)")
    process = _run("run", "--nproc", "2", str(tmp_path / "train.py"))
    assert process.returncode == 128 + 9
    assert process.stderr.splitlines()[-1].endswith(
        " was ended by SIGKILL (sent by kill -9, by a scheduler, or by the system because memory is full: then its log, dmesg, says so)"
    )


STUBBORN = """
import os, pathlib, signal, sys, time
ready, lasted = pathlib.Path(sys.argv[1], "ready"), pathlib.Path(sys.argv[1], "lasted")
def hold_on(*_):
    time.sleep(20)
    lasted.touch()
if os.environ["RANK"] == "1":
    signal.signal(signal.SIGTERM, hold_on)
    ready.touch()
    time.sleep(600)
while not ready.exists():
    time.sleep(0.1)
sys.exit(3)
"""


def test_a_rank_that_does_not_end_after_another_failed_is_killed_when_its_time_is_over(tmp_path: Path) -> None:
    """torch alone gives it 30 seconds, whatever it was told: here it would last."""
    (tmp_path / "train.py").write_text(STUBBORN)
    process = _run("run", "--nproc", "2", "--shutdown-timeout", "0", str(tmp_path / "train.py"), str(tmp_path))
    assert process.returncode == 3, process.stderr
    assert (tmp_path / "ready").exists()
    assert not (tmp_path / "lasted").exists()


def test_plan_tells_the_script_to_stop_after_the_plan(script: str) -> None:
    assert _run("plan", script, "--strategy", "ddp").stdout == (
        f"{ {'FABRICATE_STRATEGY': 'ddp', 'FABRICATE_PLAN_ONLY': '1'} } []\n"
    )


def test_a_config_file_fills_what_the_command_line_leaves_open(script: str, tmp_path: Path) -> None:
    config = tmp_path / "accelerate.yaml"
    config.write_text(
        "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 1\n"
        "deepspeed_config: {zero_stage: 2, gradient_accumulation_steps: 4, zero3_init_flag: true}\n"
    )
    process = _run("run", script, "--config", str(config), "--precision", "bf16")
    variables = {
        "FABRICATE_STRATEGY": "zero2",
        "FABRICATE_PRECISION": "bf16",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
    }
    assert process.stdout == f"{variables} []\n"
    assert process.stderr == f"note: {config}: not used by fabricate: deepspeed_config.zero3_init_flag\n"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--nproc", "4", "num_processes: 2"),
        ("--strategy", "ddp", "the strategy: fsdp"),
        ("--precision", "fp32", "mixed_precision: bf16"),
    ],
)
def test_a_config_file_that_differs_from_the_command_line_is_an_error(
    script: str, tmp_path: Path, option: str, value: str, message: str
) -> None:
    config = tmp_path / "accelerate.yaml"
    config.write_text("distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 2\n")
    process = _run("run", script, "--config", str(config), option, value)
    assert (process.returncode, process.stdout) == (2, "")
    assert (
        process.stderr
        == f"error: {option} {value} and config file {str(config)!r} ({message}) contradict each other. Set only one of them\n"
    )


def test_ranks_that_the_nodes_cannot_share_are_an_error(script: str, tmp_path: Path) -> None:
    config = tmp_path / "accelerate.yaml"
    config.write_text("distributed_type: MULTI_CPU\nnum_processes: 3\nnum_machines: 2\nmain_process_ip: a\n")
    process = _run("run", script, "--config", str(config))
    assert process.returncode == 2
    assert "num_processes=3 is not a multiple of the number of nodes, 2. Change one of them" in process.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Missing argument 'SCRIPT'"),
        (("absent.py",), "SCRIPT 'absent.py' is not a file"),
        (("--lr", "SCRIPT"), "SCRIPT '--lr' is not a file"),
        (("SCRIPT", "--nproc", "0"), "--nproc 0"),
        (("SCRIPT", "--nproc", "two"), "'two' is not a number of processes"),
        (("--nproc", "2", "SCRIPT", "--nproc", "3"), "--nproc is given with several values: 2 and 3"),
        (("SCRIPT", "--nnodes", "2"), "without --master-addr"),
        (("SCRIPT", "--config", "absent.yaml"), "'absent.yaml' cannot be read"),
    ],
)
def test_a_wrong_command_is_explained_in_a_line(script: str, arguments: tuple[str, ...], message: str) -> None:
    process = _run("run", *(script if argument == "SCRIPT" else argument for argument in arguments))
    assert (process.returncode, process.stdout) == (2, "")
    assert message in process.stderr
    assert "Traceback" not in process.stderr


@pytest.mark.parametrize("command", ["run", "plan"])
@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        ("--nprocs", "; did you mean '--nproc'?"),
        ("--nproc_per_node=4", "; use --nproc N"),
        ("--nproc-per-node", "; use --nproc N"),
        ("--num_processes", "; use --nproc N"),
        ("--gpus", "; use --nproc N"),
        ("--strategey", "; did you mean '--strategy'?"),
        ("--mixed_precision", "; use --precision NAME"),
        ("--node_rank", "; use --node-rank"),
        ("--standalone", "; leave it out: the ranks of one node find a port"),
    ],
)
def test_a_near_miss_of_an_option_does_not_reach_the_script(
    script: str, command: str, option: str, remedy: str
) -> None:
    for arguments in ((script, option, "4"), (option, "4", script)):
        result = _invoke(command, *arguments)
        assert result.exit_code == 2
        named = option.partition("=")[0]
        assert f"{named} is not an option of fabricate{remedy}. Put an option of SCRIPT after --" in result.output


def test_any_option_reaches_the_script_after_two_dashes(script: str) -> None:
    process = _run("run", script, "--lr", "0.1", "--", "--gpus", "2")
    assert process.returncode == 0, process.stderr
    assert "'--lr', '0.1', '--gpus', '2'" in process.stdout


def test_variables_that_contradict_each_other_are_told_once_before_any_rank_starts(script: str) -> None:
    process = _run("run", script, "--nproc", "2", "--precision", "fp32", ACCELERATE_MIXED_PRECISION="bf16")
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr.startswith("error: precision: FABRICATE_PRECISION says 'fp32' and ACCELERATE_MIXED_PRECISION")
    assert process.stderr.count("\n") == 1


def test_debug_shows_the_traceback() -> None:
    process = _run("--debug", "run", "absent.py")
    assert "Traceback" in process.stderr
    assert "ConfigurationError: SCRIPT 'absent.py' is not a file" in process.stderr


def test_plugins_are_listed_with_what_they_offer() -> None:
    shown = _invoke("plugins")
    assert shown.exit_code == 0
    assert re.search(r"name +distribution +version +offers +state +reason", shown.output)
    assert re.search(rf"fabricate +fabricate-trainer +{re.escape(fabricate.__version__)} .* built-in", shown.output)
    assert "strategy:ddp" in shown.output


def test_plugins_are_listed_as_json() -> None:
    (own, *_) = json.loads(_invoke("plugins", "--json").output)
    assert (own["name"], own["distribution"], own["state"]) == ("fabricate", "fabricate-trainer", "built-in")
    assert "strategy:ddp" in own["offers"]


def test_a_broken_plugin_is_listed_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "broken_plugin.py").write_text("raise ValueError('no such luck')")
    info = tmp_path / "fabricate_broken-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fabricate-broken\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[fabricate]\nbroken = broken_plugin\n")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    process = _run("plugins", PYTHONPATH=path)
    assert process.returncode == 0
    assert re.search(r"broken +fabricate-broken +1\.2 +broken .*ValueError: no such luck", process.stdout)


def _saved(root: Path, step: int) -> Path:
    staging = checkpoint.stage(root, step, "9f3a")
    record = checkpoint.write_json(staging / "progress.json", {"step": step})
    manifest = checkpoint.Manifest(
        step=step,
        run_id="run",
        nonce="9f3a",
        created="2031-05-01T12:00:00Z",
        tensors={},
        files=(record,),
        topology={"world_size": 2, "strategy": "fsdp"},
    )
    return checkpoint.commit(staging, manifest)


def _alter(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for step in (500, 1000):
        _saved(tmp_path / "checkpoints", step)
    return tmp_path


@pytest.mark.parametrize("inner", [".", "checkpoints"])
def test_checkpoints_are_listed(run_dir: Path, inner: str) -> None:
    shown = _invoke("ckpt", "ls", str(run_dir / inner))
    assert shown.exit_code == 0
    for step in (500, 1000):
        assert re.search(rf"{step} +\d+ B +2031-05-01T12:00:00Z +fsdp +2 +complete", shown.output)


def test_a_damaged_checkpoint_and_one_set_aside_are_listed_as_such(run_dir: Path) -> None:
    (run_dir / "checkpoints/step-00000500/progress.json").unlink()
    checkpoint.set_aside(run_dir / "checkpoints/step-00001000", "torn")
    shown = _invoke("ckpt", "ls", str(run_dir))
    assert shown.exit_code == 0
    assert re.search(r"step-00000500 +damaged: .*progress.json is missing", shown.output)
    assert re.search(r"\.bad-step-00001000 +set aside", shown.output)


def test_a_directory_without_checkpoints_says_so(tmp_path: Path) -> None:
    assert _invoke("ckpt", "ls", str(tmp_path)).output == f"no checkpoints in {tmp_path}\n"
    shown = _invoke("ckpt", "verify", str(tmp_path))
    assert (shown.exit_code, shown.stdout) == (2, "")
    assert "Give a run directory or one checkpoint" in shown.stderr


def test_good_checkpoints_pass_verification(run_dir: Path) -> None:
    shown = _invoke("ckpt", "verify", str(run_dir))
    assert (shown.exit_code, shown.output) == (0, "step-00000500: good\nstep-00001000: good\n")


@pytest.mark.parametrize("name", ["progress.json", "manifest.json"])
def test_an_altered_file_is_named_and_the_others_are_still_verified(run_dir: Path, name: str) -> None:
    _alter(run_dir / "checkpoints/step-00000500" / name)
    shown = _invoke("ckpt", "verify", str(run_dir))
    assert (shown.exit_code, shown.stdout) == (1, "step-00001000: good\n")
    assert re.match(rf"step-00000500: damaged: .*{re.escape(name)}", shown.stderr)


def test_one_checkpoint_is_verified_by_its_path(run_dir: Path) -> None:
    path = run_dir / "checkpoints/step-00000500"
    assert _invoke("ckpt", "verify", str(path)).output == "step-00000500: good\n"
    _alter(path / "progress.json")
    assert _invoke("ckpt", "verify", str(path)).exit_code == 1
    assert _invoke("ckpt", "verify", str(run_dir / "checkpoints/step-00001000")).exit_code == 0


@pytest.mark.parametrize("command", ["train.py", "launch", "train"])
def test_a_command_that_is_meant_as_run_is_pointed_to_run(command: str) -> None:
    shown = CliRunner().invoke(main, [command])
    script = command if command.endswith(".py") else "SCRIPT"
    assert (
        shown.exit_code,
        f"'{command}' is not a command of fabricate. To run a script: fabricate run {script}" in shown.output,
    ) == (2, True)
