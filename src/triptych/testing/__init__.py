"""The public test kit: virtual-time loop, fake engines, in-memory cluster."""
