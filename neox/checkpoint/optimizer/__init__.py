"""The optimizer's state in a checkpoint: file formats of each ZeRO stage and precision, read by parameter."""
