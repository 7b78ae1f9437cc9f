"""The network and its parameters, from YAML keys and back."""
