"""Optimizers and schedules: what `configure_optimizers` may return (`optimizers`), learning-rate schedules (`schedules`)."""
