"""Layer 5: what makes the workspace what it was."""
