"""The diagonal recurrence h_t = a_t h_{t-1} + x_t in three forms, which README.md derives."""
