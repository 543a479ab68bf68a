"""Layers 4 and 5: every process that Peri starts, and the proof that it is gone."""
