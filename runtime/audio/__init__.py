"""Speech: WAV files, and transcription by Whisper models."""
