"""Actions of the loop around a step: forward step, hooks, checks, checkpoints and exits."""
