"""Layer 3: the one authority on task state."""
