"""The numbers of a gate: comparisons, noise, slow nodes, nights and drifts. Arrays in, probabilities out."""
