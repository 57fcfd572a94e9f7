"""Commands beside the main path, one module each: arguments in, words out."""
