"""Run folders and exported models: their files, loading, evaluation and text generation."""
