"""What the paper prints: its hyperparameters beside ours."""

__all__: list[str] = []
