"""A report, and what a gate says, in every format that is written."""
