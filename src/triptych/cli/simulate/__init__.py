"""``triptych simulate``: a deployment from options (``deployment``), its runs and outputs (``command``)."""
