"""Evaluation tasks scored in training."""
