"""What an op is: its row in the table, how results follow from operands, meta kernels, views."""
