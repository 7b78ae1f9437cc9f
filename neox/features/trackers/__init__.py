"""Experiment trackers: metrics file, TensorBoard, wandb, MLflow, Comet, Trackio."""
