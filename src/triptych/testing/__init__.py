"""The public test kit: virtual-time loop, fake engines and models, links that fail, media."""
