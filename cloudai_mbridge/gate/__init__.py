"""Whether performance regressed: baselines, a comparison that knows its noise, the history."""
