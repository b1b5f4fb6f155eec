"""Generated from proto/triptych/v1 by proto/generate.sh. Never edited."""
