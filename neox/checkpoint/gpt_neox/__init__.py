"""Forms of gpt-neox's files that are not this program's own: names, rows, experts, optimizer state."""
