"""From a definition with lists to points with scalars."""
