"""What the loop does around a step: forward step, hooks, checks, checkpoints and exits."""
