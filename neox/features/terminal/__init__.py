"""Lines of training on the terminal."""
