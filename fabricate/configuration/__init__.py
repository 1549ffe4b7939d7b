"""From the arguments of `Trainer`, the launcher and files to a plan: `arguments` (the check of what is passed), `resolve` (which
strategy and precision), `opened_data` (which batches), `plan_sections` (what the plan says) and `plan` (its data and its text).
"""
