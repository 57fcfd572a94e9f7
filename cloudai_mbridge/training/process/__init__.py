"""One process of the run: its device, signals, clock, output and agreement with the other ranks."""
