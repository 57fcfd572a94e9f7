"""Searches played against tables of measured layouts: how many trials each takes."""
