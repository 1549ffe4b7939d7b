"""One update: the `losses` of a window with their weights, the return value of training_step (`step_output`), the optimizers that step
(`stepping`) or take `turns`, the `freezing` of parameters, and the modes of schedule-free optimizers (`optimizer_modes`).
"""
