"""The run log: what every rank leaves on disk, one JSON object a line."""
