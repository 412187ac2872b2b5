"""Other tools' records into ours."""
