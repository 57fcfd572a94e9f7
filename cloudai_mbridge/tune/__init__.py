"""The search for the best configuration: the possible layouts, their predicted speed, and the next trial."""
