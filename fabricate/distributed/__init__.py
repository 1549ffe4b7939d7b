"""Ranks and the Accelerator.

`engine` opens the Accelerator and prepares the model; `accelerator` is what users see of it; `shared_state` is what Accelerate knew
before; `group` is the ranks as one group, over the process groups of `connections`; `meeting` opens torch's process group; `failures` says
which rank failed first; `consistency` compares what ranks run; `loss_scaling` is backward and the update with a loss scale or without;
`fork` is what a forked process cannot use.
"""
