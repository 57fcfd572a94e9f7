"""Files of a run and others: their names, how they are read, and how they are replaced."""
