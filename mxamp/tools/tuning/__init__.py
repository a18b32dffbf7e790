"""Tools that measure a model: `benchmark` times it, `tune` finds its best policy."""
