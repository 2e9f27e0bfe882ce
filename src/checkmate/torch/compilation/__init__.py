"""One Dynamo graph compiled to guarded callables."""
