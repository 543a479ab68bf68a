"""Looking at Peri from outside: what runs, what is open, what is left."""
