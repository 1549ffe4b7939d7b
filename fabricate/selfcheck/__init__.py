"""Fits that a tool looks at: scripts run again and again, killed, resumed or split, and what differs is named.

`wishes` is what a tool asks, `plugins` what does it inside the fit; `resume_check` and `invariance` are the tools.
"""
