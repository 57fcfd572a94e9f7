"""Read what users write, and say where a mistake is."""
