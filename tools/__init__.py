"""Commands, and the packages of jobs that training never imports."""
