"""Requests to end a fit or to save: `requests` holds those of hooks, signals and clocks, `preemption` handles signals and watches the
clock, `overdue` ends a wait for data after a signal.
"""
