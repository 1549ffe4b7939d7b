"""From the arguments of `Trainer`, the launcher and files to a plan: `arguments`, `resolve`, `plan`."""
