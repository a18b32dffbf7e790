"""Loss scaling: scalers, the Trainer's overflow check, checkpoints. Imports `policy` and below."""
