"""From the arguments of `Trainer`, the launcher and files to a plan: `arguments` (checks of the arguments), `resolve` (the strategy and the
precision), `opened_data` (the batches), `plan_sections` (the lines of the plan) and `plan` (its data and text).
"""
