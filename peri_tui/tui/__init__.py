"""Layer 1: the screen, the keys and the driver tap that hands a stop to the stop lane."""
