"""The pool manager service."""
