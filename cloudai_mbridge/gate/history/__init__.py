"""The history: every imported run, in one SQLite file that only grows."""
