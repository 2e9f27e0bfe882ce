"""Properties of FX graphs and their nodes: storages and bytes, op properties, random state, provenance."""
