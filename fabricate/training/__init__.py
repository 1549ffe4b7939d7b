"""Training: the loop and everything that happens around it while a fit or an evaluation runs. In the order of a fit:

`opening` a run, its `preparation`, the `loop`, the `boundary` between updates with its `agenda`, `finish`. `batch_size` may look for one
before all of it; `first_update` looks at what the first update computed in; `halves` computes its loss whole and in halves. A folder for
each of the rest, from the lowest: `interruptions`, `state`, `updates`, `reports`, `saves`, `evaluations`.
"""
