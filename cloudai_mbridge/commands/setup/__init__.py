"""Commands for the first day: new files, and the schemas of TOML files."""
