"""Values that went wrong: found where they arise, forward and backward."""
