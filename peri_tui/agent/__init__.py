"""The agent process: scheduler (layer 3), models (layer 4), processes and rollback (layer 5)."""
