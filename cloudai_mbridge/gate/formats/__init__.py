"""Results of a gate as text, Markdown and JUnit XML."""
