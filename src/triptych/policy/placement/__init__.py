"""Which instance gets an item or a request: filters, then scores, then one pick, over the columns of a pool."""
