"""Decoding of images, videos and audio into arrays."""
