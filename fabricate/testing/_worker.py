"""One rank of a pool: a process that runs jobs from a pipe until the pipe closes.

Owns how a job is run inside the rank. It does not open a process group: the job does, or the framework that the job calls, and the group
then remains for later jobs. Jobs and results are pickles; this test tool trusts the process that started it.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import io
import operator
import os
import pickle
import random
import resource
import sys
import traceback
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any


def main(connection: Connection, output: str) -> None:
    """Run jobs and send their results until the other end of `connection` closes. Output is written to the file `output`."""
    import numpy
    import torch

    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)  # a killed rank does not flush its buffer
    random.seed()
    numpy.random.seed()  # forked processes would share the generator state
    faulthandler.enable()  # on SIGABRT, dump the stacks of all threads, even in a blocked collective
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    connection.send_bytes(pickle.dumps((True, None)))  # ready
    while True:
        try:
            job = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        faulthandler.dump_traceback_later(job["end_after_seconds"], exit=True)
        answer = _answer(job)
        faulthandler.cancel_dump_traceback_later()
        connection.send_bytes(answer)


def _answer(job: dict[str, Any]) -> bytes:
    """Run `job`; return the pickle of ``(True, result)`` or ``(False, (exception type, summary, traceback))``."""
    try:
        os.chdir(job["directory"])
        os.environ.clear()
        os.environ.update(job["environment"])
        if sys.path != job["path"]:
            sys.path[:] = job["path"]
            importlib.invalidate_caches()
        function = operator.attrgetter(job["qualname"])(_load(job["module"], job["file"]))
        # After the import, because arguments may be instances of classes in that file.
        arguments, keywords = pickle.loads(job["arguments"])
        return pickle.dumps((True, function(*arguments, **keywords)))
    except BaseException as exception:
        summary = "".join(traceback.format_exception_only(exception)).strip()
        return pickle.dumps((False, (type(exception).__qualname__, f"raised {summary}", traceback.format_exc())))


def _load(name: str, file: str) -> ModuleType:
    """The module `name`, loaded from `file`. The file need not be on the import path (it is not in pytest's importlib mode)."""
    if name == "__main__":
        name = "__mp_main__"  # multiprocessing's name: a block under `if __name__ == "__main__"` must not run here
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__file__ == file:
        return loaded
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # its parent package exists only in the caller
        spec = None
    if spec is None or spec.origin != file:
        spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file!r} is not a Python file", name=name, path=file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it is executed, because its dataclasses and pickles look it up
    if name == "__mp_main__":
        sys.modules["__main__"] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
