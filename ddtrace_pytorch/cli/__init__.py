"""The `ddtrace-pytorch` command."""
