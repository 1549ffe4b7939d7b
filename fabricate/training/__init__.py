"""Training: the loop and everything that happens around it while a fit or an evaluation runs."""
