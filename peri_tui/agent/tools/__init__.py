"""What a model may do, one tool a module."""
