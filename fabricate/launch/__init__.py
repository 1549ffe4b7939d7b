"""How this process was started (`ranks`), the settings that its launcher passes on, and how to start one process per rank (`commands`).

`settings` reads the settings in the environment: `accelerate_variables`, with `accelerate_fsdp` and `accelerate_mesh`, reads Accelerate's
variables, and `variables` reads one variable. `torchrun_variables` reads torchrun's. `config_files` reads an Accelerate YAML or a DeepSpeed
JSON (`deepspeed_file`). `uncaught` prints the exception that ends a rank. `unsupported` names the kinds of parallelism that do not exist
here. Must not know plugins, devices or the loop; imports no torch.
"""
