"""What the paper prints: its hyperparameters beside ours."""
