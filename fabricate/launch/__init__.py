"""How this process was started (`ranks`), what its launcher asks for (`settings`, `config_files`, `fsdp_keys`, `mesh_keys`), which
kinds of parallelism do not exist (`unsupported`), and how to start one process per rank (`commands`). Must not know plugins, devices
or the loop, and imports no torch.
"""
