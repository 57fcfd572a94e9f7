"""Performance regression gate: baselines, noise-aware comparison, history."""
