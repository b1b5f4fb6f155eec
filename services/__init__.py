"""Applications: one folder is one process. Services never import each other."""
