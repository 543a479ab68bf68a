"""Layer 2: everything between a user's wish and the agent process."""
