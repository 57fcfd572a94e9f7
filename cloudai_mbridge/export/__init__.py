"""Results to where teams look: a module for each target, through the target's own library."""
