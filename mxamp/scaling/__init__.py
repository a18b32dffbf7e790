"""Loss scaling: scalers, the overflow check of trainers, checkpoints. Imports `policy`."""
