"""What every experiment stands on: whole files, rows, checkpoints, the training loop and the ranks it works on."""

__all__: list[str] = []
