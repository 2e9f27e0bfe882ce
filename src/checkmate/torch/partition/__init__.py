"""From a plan to FX modules: apply it to the joint graph, partition, and check the peak of the resulting modules."""
