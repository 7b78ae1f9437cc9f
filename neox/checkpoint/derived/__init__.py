"""Checkpoints made of others: for other degrees, with other rows of the vocabulary, their mean, upcycled experts."""
