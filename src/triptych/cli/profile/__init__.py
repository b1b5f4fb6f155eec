"""``triptych profile``: measures the costs of a model's parts on this hardware."""
