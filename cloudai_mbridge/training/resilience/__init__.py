"""Faults: results that look wrong, ranks that are slow or hang, restarts without a new job."""
