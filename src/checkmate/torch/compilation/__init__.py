"""One Dynamo graph compiled to guarded callables, and several that share one budget."""
