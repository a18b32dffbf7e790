"""What is installed here, what it means for each dtype, and what is wrong: for `mxamp doctor`."""
