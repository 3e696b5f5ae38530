"""From the arguments of a call to batches that can be solved, and back."""
