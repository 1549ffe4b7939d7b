"""Numbers about a run: metrics (`reduction`, and `torchmetrics_objects` for objects inside a module), the weight of a loss (`loss_weight`)
and its form (`loss_form`), both read from its graph (`loss_graph`), what a step of an evaluation computes (`step_record`) and the weights
of its metrics (`step_watch`), counters (`counters`), time (`timing`), the device (`device`), and the reading of numbers (`reading`).
"""
