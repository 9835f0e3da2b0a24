"""Keys and queries of all heads, made of shared ones and rotated by running angles."""
