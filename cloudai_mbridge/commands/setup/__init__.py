"""Setup commands: new files, and the schemas of TOML files."""
