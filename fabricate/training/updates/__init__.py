"""One update: the `losses` of a window and what they weigh, what training_step returned (`step_output`), which optimizers step
(`stepping`), and those that take `turns`; `freezing` of parameters, `optimizer_modes` of schedule-free optimizers.
"""
