"""Linear attention with decay: reference, associative-scan and chunked forms. README.md derives them."""
