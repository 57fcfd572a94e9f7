"""Commands in addition to the main path, one module each: arguments in, text out."""
