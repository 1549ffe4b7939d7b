"""`python -m fabricate.cli.runner ARGUMENTS`: runs a script as `fabricate run` asks, on one process or through torchrun.

Owns how a script is started once everything is decided, and the exit code: the script's own, or that of the first rank
that failed; 128 + N where signal N ended it; `EXIT_PREEMPTED` where a fit was told to end, saved its state, and the script
ended without an error. It must not know settings (fabricate.launch), and imports torch only where it runs torchrun.
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

# SIGUSR1 as well: schedulers send it ahead of the end, and torchrun would die of it and leave its ranks behind.
_FORWARDED = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
_ENDED_BY_REQUEST = (0, EXIT_PREEMPTED, 128 + signal.SIGTERM, 128 + signal.SIGUSR1)


def main(arguments: Sequence[str]) -> int:
    """Run what follows ``--``: in this process after ``--alone``, else through torchrun with the options before it."""
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
    """torchrun, with the exit code of the first rank that failed; 128 + N where signal N ended it or torchrun."""
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
    # Silences a message of torchrun, which reports that it has no file to write the reason of a failure to.
    logging.getLogger("torch.distributed.elastic.multiprocessing.errors.error_handler").setLevel(logging.CRITICAL)
    _wait_for_ranks(float(os.environ.get(SHUTDOWN_TIMEOUT, "30")))
    try:
        main(list(arguments))
    except ChildFailedError as exc:
        rank, failure = exc.get_first_failure()
        code = failure.exitcode
        if code != EXIT_PREEMPTED:
            print(_gist(rank, code, failure.message), file=sys.stderr)
        return code if code > 0 else 128 - code
    except SignalException as exc:
        return 128 + int(exc.sigval)
    except ValueError as exc:  # raised by torchrun itself: the failure of a rank is a ChildFailedError
        print(f"--nproc: torchrun cannot count the devices of this machine ({exc}). Give a number", file=sys.stderr)
        return 2
    return 0


def _gist(rank: int, code: int, message: Any) -> str:
    """What to know of the failure that ended the ranks, printed last. message: what torchrun knows, a mapping where a rank left its
    reason (`fabricate.launch.uncaught`)."""
    if isinstance(message, dict):
        text: str = message["extraInfo"]["py_callstack"]
        return text
    if code > 0:
        return f"rank {rank} ended with exit code {code}, without an exception. See the output of the rank"
    name = signal.Signals(-code).name
    killed = ". The system does this when memory is full: see the system's log (dmesg)" if name == "SIGKILL" else ""
    return f"rank {rank} was ended by {name}{killed}"


def _wait_for_ranks(seconds: float) -> None:
    """Ranks have `seconds` to end also where another one failed: there torch 2.13 gives them 30, whatever it was told."""
    from torch.distributed.elastic.multiprocessing.api import PContext

    close = PContext.close

    def closing(self: PContext, death_sig: signal.Signals | None = None, timeout: float = seconds) -> None:
        close(self, death_sig, timeout)  # type: ignore[arg-type]

    PContext.close = closing  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
