"""Work on every host of a cluster: containers, and one command on each host."""
