"""What `deepy.py` does on the head node before ranks start: read, plan, check. It asks every room; no torch here."""
