"""A configuration as text: YAML and JSON files, overrides, the printed summary."""
