"""The rules that join the sections of a configuration, and the order in which they are applied."""
