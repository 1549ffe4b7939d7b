"""Optimizers and schedules: what `configure_optimizers` may return (`optimizers`), when learning-rate schedules advance (`schedules`),
and those that have names (`named_schedules`).
"""
