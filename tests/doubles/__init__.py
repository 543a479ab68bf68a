"""Doubles: scripted stand-ins for the outside world."""
