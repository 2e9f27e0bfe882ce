"""AOTAutograd's joint graph as a `checkmate.core.graph.Graph`."""
