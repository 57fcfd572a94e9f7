"""Files of a run and other files: their names, reading, and replacement."""
