"""Pure logic: no await, no clock, no file, no socket. Time and randomness are passed in."""
