"""Numbers about a run: metrics (`reduction`), counters (`counters`), what a loss is the mean of (`loss_weight`), time (`timing`)."""
