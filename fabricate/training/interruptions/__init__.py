"""What ends a fit from outside, or asks for a save: `requests` made by hooks, signals and clocks, `preemption`, which hears signals and
watches the clock, `overdue` for data that does not come after a signal.
"""
