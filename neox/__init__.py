"""neox: train GPTs with DeepSpeed from NeoX-style YAML, and hand them to Hugging Face."""

__version__ = "0.1.0"
