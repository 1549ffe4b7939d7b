"""Training: the loop, and everything around it while a fit or an evaluation runs. In the order of a fit:

`opening` a run, its `preparation`, the `loop`, the `boundary` between updates with its `agenda`, `finish`. Before these, `batch_size` may
search for a batch size. `first_update` reports the dtypes of the first update; `halves` compares the loss of a batch with the losses of its
halves. The folders, in their order of imports: `interruptions`, `state`, `updates`, `reports`, `saves`, `evaluations`.
"""
