"""Optimizers and schedules: the values that `configure_optimizers` may return (`optimizers`), when learning-rate schedules advance
(`schedules`), and schedules with a name (`named_schedules`).
"""
