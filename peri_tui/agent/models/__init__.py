"""Layer 4: talking to models, and hanging up on them."""
