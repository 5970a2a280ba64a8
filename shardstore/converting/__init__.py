"""Making a store: the plan, one shard, the place it is written to, the whole."""
