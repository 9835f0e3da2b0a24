"""The diagonal recurrence h_t = a_t h_{t-1} + x_t; README.md derives its forms."""
