"""Reference model of training on preferences."""
