"""The values in users' files: node lists, durations, paths, references, credentials."""
