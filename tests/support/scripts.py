"""Runs scripts like `python SCRIPT`, without the seconds for the import of torch and Accelerate."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path

import torch

from fabricate.testing import ranks

_OFFLINE = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


def run_script(script: Path, *arguments: str, directory: Path, timeout: float = 600) -> str:
    """The output of `python SCRIPT ARGUMENTS` in `directory`, without the network, on the CPU, with one thread. AssertionError if it fails.

    Its process is forked from the process that also forks the pools of ranks, which has imported torch and Accelerate."""
    printed = directory / f"{script.stem}.printed"
    ranks._forks.set_forkserver_preload(ranks._IMPORTED)
    arguments_of_process = (str(script), arguments, str(directory), dict(os.environ) | _OFFLINE, str(printed))
    process = ranks._forks.Process(target=_run, args=arguments_of_process)
    with ranks._environment(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""):
        process.start()
    process.join(timeout)
    code = process.exitcode
    if code is None:
        process.kill()
        process.join()
    process.close()
    text = printed.read_text(encoding="utf-8")
    assert code == 0, f"{script.name} {arguments} ended with {code}\n{text[-6000:]}"
    return text


def _run(script: str, arguments: tuple[str, ...], directory: str, environment: Mapping[str, str], printed: str) -> None:
    """Run the script in the new process, like `python SCRIPT ARGUMENTS`."""
    file = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    sys.argv[:] = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except Exception:
        traceback.print_exc()
        sys.exit(1)
