"""History of all imported runs, in an append-only SQLite file."""
