"""Ranks and the Accelerator.

`engine` opens the Accelerator and prepares the model; `accelerator` is its class, which users see as `trainer.accelerator`; `shared_state`
sets aside the state that Accelerate shares within a process; `group` sends messages between the ranks, over the process groups of
`connections`; `meeting` opens torch's process group; `failures` finds the rank that failed first; `consistency` compares what the ranks
run; `loss_scaling` runs backward and the update with or without a loss scale; `fork` prepares a forked process.
"""
