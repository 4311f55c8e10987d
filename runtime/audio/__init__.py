"""Speech: WAV files."""
