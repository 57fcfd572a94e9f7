"""Statistics of a gate: comparisons, noise, slow nodes, nights. Arrays in, probabilities out."""
