"""The papers' experiments: data with known answers, and how models are trained and scored on it."""
