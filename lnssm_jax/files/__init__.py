"""Files: reading what others wrote, checked, and writing so that a crash leaves no half.

- reading.py: regular files, JSON, digests, retried where storage is flaky
- checked_json.py: JSON with bounds on size, depth and numbers
- atomic.py: atomic and durable writes
- printable.py: text from elsewhere in messages and commands
"""
