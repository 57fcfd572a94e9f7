"""Read the users' TOML files, and report the place of every mistake."""
