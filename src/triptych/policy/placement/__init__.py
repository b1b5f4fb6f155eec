"""Placement of items and requests on instances: filters, then scores, then one pick, over the columns of a pool."""
