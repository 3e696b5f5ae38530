"""The models that the experiments compare: nn.Modules called as model(query, key, value)."""
