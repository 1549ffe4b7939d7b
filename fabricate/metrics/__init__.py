"""Numbers about a run: metrics (`reduction`, and `torchmetrics_objects` inside a module), counters (`counters`), what a loss is the
mean of (`loss_weight`), time (`timing`).
"""
