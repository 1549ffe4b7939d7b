"""Training: the loop and everything that happens around it while a fit or an evaluation runs. In the order of a fit:

`opening` a run, its `preparation`, the `loop` over `losses` (with `step_output`: what training_step returned; `first_update`: what it
was computed in), the `boundary` between updates with its `agenda`, `evaluation` (with `evaluated`: its metrics;
`sanity`: some batches before training; `halves`: a loss, whole and in halves), `finish`. Saving: `saving` (when), `saved_state`
(what), `resuming` (from which checkpoint). State: `run_state`, `journal`, `requests`; what requests the end from outside:
`preemption`. `error_hints` explains errors of torch.
"""
