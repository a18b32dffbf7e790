"""Loss scaling: loss scalers, the overflow check of trainers, and their checkpoints.

Builds on `policy`.
"""
