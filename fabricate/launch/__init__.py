"""How this process was started (`places`), what its launcher was told (`asked`, `config_files`, `fsdp_keys`, `mesh_keys`), and
how to start one process per rank (`starting`). Must not know plugins, devices or the loop, and imports no torch.
"""

from fabricate.launch.commands import (
    PREEMPTED_FILE,
    SHUTDOWN_TIMEOUT,
    command,
    environment,
    listed_plugins,
    tell_preempted,
)
from fabricate.launch.config_files import ConfigFile, read_config
from fabricate.launch.ranks import Launch, detect
from fabricate.launch.settings import Request, requests

__all__ = [
    "PREEMPTED_FILE",
    "SHUTDOWN_TIMEOUT",
    "ConfigFile",
    "Launch",
    "Request",
    "command",
    "detect",
    "environment",
    "listed_plugins",
    "read_config",
    "requests",
    "tell_preempted",
]
