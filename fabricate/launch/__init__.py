"""How this process was started (`ranks`), which settings its launcher passes on, and how to start one process per rank (`commands`).

`settings` are those of the environment: `accelerate_variables`, with `accelerate_fsdp` and `accelerate_mesh`, reads Accelerate's,
`variables` reads one variable. `config_files` are those of an Accelerate YAML or a DeepSpeed JSON (`deepspeed_file`).
`unsupported` names the kinds of parallelism that do not exist here. Must not know plugins, devices or the loop; imports no torch.
"""
