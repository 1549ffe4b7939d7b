"""`python -m fabricate.cli.runner ARGUMENTS`: runs a script for `fabricate run`, in one process or through torchrun.

Owns the start of a script whose settings are decided, and the exit code: the script's, or that of the first rank that failed; 128 + N if
signal N ended it; `EXIT_PREEMPTED` if a fit was preempted, saved its state, and the script ended without an error. Must not know: settings
(fabricate.launch). Imports torch only to run torchrun.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from fabricate.cli.rank import run_script
from fabricate.launch.commands import PREEMPTED_FILE, SHUTDOWN_TIMEOUT
from fabricate.values import EXIT_PREEMPTED

# SIGUSR1 too: schedulers send it before the end. Without this, it would kill torchrun but not its ranks.
_FORWARDED = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
_ENDED_BY_REQUEST = (0, EXIT_PREEMPTED, 128 + signal.SIGTERM, 128 + signal.SIGUSR1)


def main(arguments: Sequence[str]) -> int:
    """Run the script that follows ``--``: in this process after ``--alone``, else through torchrun with the options before it."""
    with tempfile.TemporaryDirectory(prefix="fabricate-run-") as folder:
        os.environ[PREEMPTED_FILE] = preempted_file = os.path.join(folder, "preempted")
        if arguments[0] == "--alone":
            code = _alone(arguments[2], arguments[3:])
        else:
            code = _torchrun(["--signals-to-handle", _FORWARDED, *arguments])
        return EXIT_PREEMPTED if code in _ENDED_BY_REQUEST and os.path.exists(preempted_file) else code


def _alone(script: str, arguments: Sequence[str]) -> int:
    """Run the script in this process. The exit code of a preempted fit counts as success."""
    try:
        run_script(script, arguments)
    except SystemExit as exc:
        if exc.code not in (None, 0, EXIT_PREEMPTED):
            raise
    return 0


def _torchrun(arguments: Sequence[str]) -> int:
    """Run torchrun; return the exit code of the first rank that failed, or 128 + N if signal N ended the rank or torchrun."""
    import logging

    import torch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    if "--numa-binding" in arguments[: arguments.index("--")] and not torch.cuda.is_available():
        print(
            "--numa-binding: torch binds ranks to cores near NVIDIA GPUs, and there are none here. Leave the option out",
            file=sys.stderr,
        )
        return 2
    # Suppress torchrun's message that it has no file for the reason of a failure.
    logging.getLogger("torch.distributed.elastic.multiprocessing.errors.error_handler").setLevel(logging.CRITICAL)
    _wait_for_ranks(float(os.environ.get(SHUTDOWN_TIMEOUT, "30")))
    try:
        main(list(arguments))
    except ChildFailedError as exc:
        rank, failure = exc.get_first_failure()
        code = failure.exitcode
        if code == -signal.SIGTERM and isinstance(failure.message, dict):
            code = 1  # it had recorded its exception, and was ended while it exited because another rank had failed too
        if code != EXIT_PREEMPTED:
            print(_gist(rank, code, failure.message), file=sys.stderr)
        return code if code > 0 else 128 - code
    except SignalException as exc:
        return 128 + int(exc.sigval)
    except ValueError as exc:  # from torchrun itself; the failure of a rank is a ChildFailedError
        print(f"--nproc: torchrun cannot count the devices of this machine ({exc}). Give a number", file=sys.stderr)
        return 2
    return 0


def _gist(rank: int, code: int, message: Any) -> str:
    """The text about the failure that ended the ranks, which is printed last. message: from torchrun; a mapping if the rank recorded its
    reason (`fabricate.launch.uncaught`)."""
    if isinstance(message, dict):
        text: str = message["extraInfo"]["py_callstack"]
        return text
    if code > 0:
        return f"rank {rank} ended with exit code {code}, without an exception. See the output of the rank"
    name = signal.Signals(-code).name
    cause = " (sent by kill -9, by a scheduler, or by the system because memory is full: then its log, dmesg, says so)"
    killed = cause if name == "SIGKILL" else ""
    return f"rank {rank} was ended by {name}{killed}"


def _wait_for_ranks(seconds: float) -> None:
    """Give ranks `seconds` to end after another rank failed, too. In this case torch 2.13 always waits 30 seconds, whatever its setting."""
    from torch.distributed.elastic.multiprocessing.api import PContext

    close = PContext.close

    def closing(self: PContext, death_sig: signal.Signals | None = None, timeout: float = seconds) -> None:
        close(self, death_sig, timeout)  # type: ignore[arg-type]

    PContext.close = closing  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
