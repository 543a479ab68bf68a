"""One widget a module; widgets read the view model and never write it."""
