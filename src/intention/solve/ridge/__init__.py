"""Q (K'WK + alpha I)^-1 K'WV of a batch: the call, its routes, its gradients."""
